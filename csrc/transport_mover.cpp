// See transport_mover.h.
#include "transport_mover.h"

#include <cstring>
#include <mutex>

namespace tbik {

std::byte* MoverTransport::outgoing() {
  std::vector<std::byte>& buffer = messages_[(round_ + 1) % 2];
  if (buffer.empty()) buffer.resize(static_cast<size_t>(capacity_));
  return buffer.data();
}

void MoverTransport::exchange(const Tag& tag, const std::vector<Part>& parts, const Where& where) {
  const std::string what = describe(where, rank_, size_);
  if (const std::string reason = broken(); !reason.empty()) {
    throw TransportError(TransportFailure::kAborted, name_ + ": " + what + ": an earlier call of these ranks failed (" +
                                                         reason + "). Make a new group or communicator");
  }
  own_ = outgoing();
  ++round_;
  parts_ = &parts;
  tags_[static_cast<size_t>(rank_)] = tag;
  std::vector<Bytes> to(static_cast<size_t>(size_));
  std::vector<Bytes> from(static_cast<size_t>(size_));
  for (size_t p = 0; p < to.size(); ++p) {
    if (p == static_cast<size_t>(rank_)) continue;
    size_t send = sizeof(Tag);
    size_t receive = sizeof(Tag);
    for (const Part& part : parts) {
      if (!part.to.empty()) send += static_cast<size_t>(part.to[p].size);
      if (!part.from.empty()) receive += static_cast<size_t>(part.from[p].size);
    }
    send_[p].resize(send);
    receive_[p].resize(receive);
    std::byte* at = send_[p].data();
    std::memcpy(at, &tag, sizeof(Tag));
    at += sizeof(Tag);
    for (const Part& part : parts) {
      if (part.to.empty() || part.to[p].size == 0) continue;
      std::memcpy(at, own_ + part.to[p].offset, static_cast<size_t>(part.to[p].size));
      at += part.to[p].size;
    }
    to[p] = {send_[p].data(), static_cast<int64_t>(send)};
    from[p] = {receive_[p].data(), static_cast<int64_t>(receive)};
  }
  try {
    move_(to, from, what, limit_);
  } catch (const std::exception& error) {
    set_broken(error.what());
    // What is still under way reads and writes these for as long as the process lives.
    static auto* const abandoned = new std::vector<std::vector<std::vector<std::byte>>>;
    static std::mutex guard;
    const std::lock_guard<std::mutex> lock(guard);
    abandoned->push_back(std::move(send_));
    abandoned->push_back(std::move(receive_));
    throw;
  }
  for (size_t p = 0; p < to.size(); ++p) {
    if (p != static_cast<size_t>(rank_)) std::memcpy(&tags_[p], receive_[p].data(), sizeof(Tag));
  }
}

const std::byte* MoverTransport::incoming(int peer, size_t part) const {
  const std::vector<Part>& parts = *parts_;
  if (peer == rank_) return own_ + parts[part].to[static_cast<size_t>(rank_)].offset;
  const size_t p = static_cast<size_t>(peer);
  const std::byte* at = receive_[p].data() + sizeof(Tag);
  for (size_t i = 0; i < part; ++i) {
    if (!parts[i].from.empty()) at += parts[i].from[p].size;
  }
  return at;
}

void MoverTransport::abort(const std::string& reason) { set_broken(reason); }

std::string MoverTransport::broken() {
  const std::lock_guard<std::mutex> lock(guard_);
  return broken_;
}

void MoverTransport::set_broken(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(guard_);
  if (broken_.empty()) broken_ = reason.substr(0, 300);
}

}  // namespace tbik
