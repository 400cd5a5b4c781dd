#include "holmes/cuda/staged_message.hpp"

#include <algorithm>
#include <utility>

namespace holmes::cuda {

StagedSend::StagedSend(std::shared_ptr<PinnedRing> ring, Buffer buffer, EventPtr begin, std::size_t done_bytes)
    : ring_(std::move(ring)), buffer_(std::move(buffer)), begin_(std::move(begin)), started_bytes_(done_bytes) {}

bool StagedSend::fill() {
  while (started_bytes_ < buffer_.bytes()) {
    ring_->collect();
    if (!ring_->has_free_slot()) return false;
    if (const EventPtr begin = std::exchange(begin_, nullptr)) ring_->put_behind(begin);
    const std::size_t bytes = std::min(ring_->slot_bytes(), buffer_.bytes() - started_bytes_);
    const int slot = ring_->take_slot();
    parts_.push_back({slot, ring_->copy_to_host(slot, buffer_, started_bytes_, bytes), bytes});
    started_bytes_ += bytes;
  }
  return true;
}

std::span<const std::byte> StagedSend::ready() const {
  if (parts_.empty() || !ring_->has_ended(parts_.front().ticket)) return {};
  std::size_t bytes = parts_.front().bytes - front_sent_bytes_;
  for (std::size_t i = 1; i < std::min(parts_.size(), PinnedRing::slots_at_once()); ++i) {
    if (parts_[i].slot != parts_[i - 1].slot + 1 || !ring_->has_ended(parts_[i].ticket)) break;
    bytes += parts_[i].bytes;  // only the last part of a message is no whole slot
  }
  return {ring_->memory(parts_.front().slot) + front_sent_bytes_, bytes};
}

void StagedSend::sent(std::size_t bytes) {
  front_sent_bytes_ += bytes;
  while (!parts_.empty() && front_sent_bytes_ >= parts_.front().bytes) {
    front_sent_bytes_ -= parts_.front().bytes;
    sent_bytes_ += parts_.front().bytes;
    ring_->give_back(parts_.front().slot);
    parts_.pop_front();
  }
  ring_->collect();
}

std::string StagedSend::state_text() const {
  std::size_t bytes = sent_bytes_;
  for (const Part& part : parts_)
    if (ring_->has_ended(part.ticket)) bytes += part.bytes;
  return ", " + std::to_string(bytes) + " bytes copied from the GPU" + ring_->error_text();
}

StagedRecv::StagedRecv(std::shared_ptr<PinnedRing> ring, Buffer buffer, EventPtr begin, std::size_t done_bytes)
    : ring_(std::move(ring)), buffer_(std::move(buffer)), begin_(std::move(begin)), received_bytes_(done_bytes) {}

StagedRecv::~StagedRecv() {
  if (slot_ >= 0) ring_->give_back(slot_);
}

std::span<std::byte> StagedRecv::space() {
  if (is_received()) return {};
  if (slot_ < 0) {
    ring_->collect();
    if (!ring_->has_free_slot()) return {};
    slot_ = ring_->take_slot();
    slot_filled_bytes_ = 0;
  }
  return {ring_->memory(slot_) + slot_filled_bytes_, space_bytes()};
}

std::size_t StagedRecv::space_bytes() const {
  if (slot_ < 0 && !ring_->has_free_slot()) return 0;
  return std::min(ring_->slot_bytes() - (slot_ < 0 ? 0 : slot_filled_bytes_), buffer_.bytes() - received_bytes_);
}

void StagedRecv::received(std::size_t bytes) {
  slot_filled_bytes_ += bytes;
  received_bytes_ += bytes;
  if (bytes == 0 || (slot_filled_bytes_ < ring_->slot_bytes() && !is_received())) return;
  if (const EventPtr begin = std::exchange(begin_, nullptr)) ring_->put_behind(begin);
  const int slot = std::exchange(slot_, -1);
  last_ticket_ = ring_->copy_to_device(slot, buffer_, received_bytes_ - slot_filled_bytes_, slot_filled_bytes_);
}

}  // namespace holmes::cuda
