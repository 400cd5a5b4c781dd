// A CommunicatorRecord and a process's metrics as JSON.
#pragma once

#include "holmes/record/communicator_record.hpp"
#include "holmes/record/json_writer.hpp"
#include "holmes/record/registry.hpp"

namespace holmes {

// Times in seconds of the monotonic clock; absent values are null.
void append_json(JsonWriter& json, const CommunicatorRecord& record);
// Lists of objects, by group and NIC, operation or error; what has not ended with the seconds since its call.
void append_json(JsonWriter& json, const Metrics& metrics);

}  // namespace holmes
