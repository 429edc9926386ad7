// Transport over a function of the caller's that carries bytes from rank to rank (MPI: tbik/launch.py).
//
//   move(to, from, what, limit)   to[p]: bytes for rank p; from[p]: where p's bytes go, all of a message or as many as
//                                 fit: the rest is dropped. Own entries are empty. Returns when all have arrived and
//                                 every to[p] may be written again. Throws TransportError.
//
// One message per peer and exchange: its tag, then its pieces. The function takes a message of any length, so that
// ranks which disagree about the call find it in the tags and stay in step. One thread at a time. Errors:
// TransportError.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transport.h"

namespace tbik {

struct Bytes {
  std::byte* data = nullptr;
  int64_t size = 0;
};

class MoverTransport final : public Transport {
 public:
  using Move = std::function<void(const std::vector<Bytes>& to, const std::vector<Bytes>& from, const std::string& what,
                                  std::chrono::nanoseconds limit)>;

  MoverTransport(std::string name, Move move, int rank, int size, int64_t capacity)
      : Transport(rank, size), name_(std::move(name)), move_(std::move(move)), capacity_(capacity) {
    tags_.resize(static_cast<size_t>(size));
    send_.resize(static_cast<size_t>(size));
    receive_.resize(static_cast<size_t>(size));
  }

  const char* name() const override { return name_.c_str(); }
  int64_t capacity() const override { return capacity_; }
  std::byte* outgoing() override;
  void exchange(const Tag& tag, const std::vector<Part>& parts, const Where& where) override;
  const std::byte* incoming(int peer, size_t part) const override;
  const Tag& tag(int peer) const override { return tags_[static_cast<size_t>(peer)]; }

  // Peers are not told: their own limits end their waits.
  void abort(const std::string& reason) override;

 private:
  const std::string name_;
  const Move move_;
  const int64_t capacity_;
  uint64_t round_ = 0;
  std::vector<std::byte> messages_[2];
  std::vector<std::vector<std::byte>> send_;     // [p]
  std::vector<std::vector<std::byte>> receive_;  // [p]
  std::vector<Tag> tags_;
  const std::vector<Part>* parts_ = nullptr;
  const std::byte* own_ = nullptr;

  // Any thread may abort; the first reason stays.
  std::string broken();
  void set_broken(const std::string& reason);
  std::mutex guard_;
  std::string broken_;
};

}  // namespace tbik
