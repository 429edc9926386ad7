// Moves bytes between the ranks of one group. No dtypes, no additions: what is folded, and in which order, is decided
// above.
//
//   round t:  every rank fills outgoing(), then exchange(t): posts it and waits for every peer's message of round t
//             incoming(p, i) = part i of p's message that is meant for this rank
//
//   message   one rank's bytes of one round, at most capacity()
//   piece     bytes [offset, offset + size) of a sender's message; several ranks may be meant by the same piece
//   tag       says what the message belongs to; carried and handed out, compared by the caller
//
// incoming() is valid until the next exchange() is entered; outgoing() after exchange(t) is the message of round t + 1
// and may be written at once. Memory belongs to the transport. One thread at a time; exchange() blocks.
// No wait is unbounded: every wait ends at the limit, when a peer is gone, or when any rank aborts.
// Errors: TransportError that says what, collective, call, rank, peer, phase, expected, got, elapsed, limit, next step.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace tbik {

// kTimeout: a peer did not answer; kPeerGone: its process ended; kAborted: another rank gave up, its reason is quoted;
// kMismatch: the ranks disagree about the call, found between two messages: the group stays in step and usable.
enum class TransportFailure : uint8_t { kTimeout, kPeerGone, kAborted, kMismatch, kMisuse };

class TransportError : public std::runtime_error {
 public:
  TransportError(TransportFailure failure, const std::string& what) : std::runtime_error(what), failure(failure) {}
  TransportFailure failure;
};

// call: the same on all ranks of one call, different for the next; own: may differ between ranks.
struct Tag {
  std::array<uint64_t, 7> call{};
  uint64_t own = 0;
  bool operator==(const Tag&) const = default;
};

struct Piece {
  int64_t offset = 0;  // in the sender's message
  int64_t size = 0;
  const std::byte* at = nullptr;  // where it lies instead, if the transport lends(); unchanged until exchange() returns
};

// One part of a round. to[p]: piece of this rank's message for rank p. from[p]: piece of p's message for this rank. The
// two sides state the same sizes; own entries are ignored by the wire. Empty vectors: the part moves nothing this
// round. The parts of an exchange must live until the next one.
struct Part {
  std::vector<Piece> to;
  std::vector<Piece> from;
};

// Where the caller stands; only for messages.
struct Where {
  const char* collective = "";
  uint64_t call = 0;
  const char* phase = "";
  int64_t segment = 0;
  int64_t num_segments = 0;
};

class Transport {
 public:
  Transport(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual const char* name() const = 0;

  // Largest message in bytes. The same on all ranks.
  virtual int64_t capacity() const = 0;
  virtual std::byte* outgoing() = 0;

  // Pieces may be sent from the caller's own memory (Piece::at), without a copy into outgoing().
  virtual bool lends() const { return false; }
  virtual void exchange(const Tag& tag, const std::vector<Part>& parts, const Where& where) = 0;
  virtual const std::byte* incoming(int peer, size_t part) const = 0;
  virtual const Tag& tag(int peer) const = 0;

  // All ranks have entered.
  void barrier(const Tag& tag, const Where& where) { exchange(tag, {}, where); }

  // Wakes every rank that waits in this group; their exchange() fails with `reason`. Any thread. The first reason
  // stays.
  virtual void abort(const std::string& reason) = 0;

  // What this rank is doing, for the messages of others. At most 31 characters are kept.
  virtual void note(const char* /*activity*/) {}

  // Peers that still wait for this rank learn that it has left, instead of waiting for their limit.
  virtual void leave() {}

  // The rank whose message this rank's exchange() sleeps for; -1: none, or not known. Any thread.
  virtual int awaited() const { return awaited_.load(std::memory_order_relaxed); }

  // Payload bytes that this rank has addressed to each rank; empty where nobody counts.
  virtual std::vector<int64_t> bytes_sent() const { return {}; }

  void set_limit(std::chrono::nanoseconds limit) { limit_ = limit; }
  std::chrono::nanoseconds limit() const { return limit_; }

 protected:
  const int rank_;
  const int size_;
  std::atomic<int> awaited_{-1};
  std::chrono::nanoseconds limit_ = std::chrono::minutes(30);  // of one wait
};

// "all_reduce, call 41, rank 2 of 4, phase 'chunks', segment 3 of 8"
std::string describe(const Where& where, int rank, int size);

}  // namespace tbik
