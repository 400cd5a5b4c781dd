// A CommunicatorRecord as JSON.
#pragma once

#include "holmes/record/communicator_record.hpp"
#include "holmes/record/json_writer.hpp"

namespace holmes {

// Times in seconds of the monotonic clock; absent values are null.
void append_json(JsonWriter& json, const CommunicatorRecord& record);

}  // namespace holmes
