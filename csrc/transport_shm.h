// Transport over memory shared by the processes of one host.
//
//   [ header | line of rank 0 .. W-1 | slots: rank r, parity b at (2r + b) * slot_bytes ]
//
// Round t of rank r lies in slot (r, t mod 2). Its line's `posted` counter becomes t (release) when the message is
// complete; a reader waits until it is t (acquire). Before rank r writes round t + 2 it has seen `posted` >= t + 1 from
// everyone, and a rank posts t + 1 only after it has read all messages of round t: no slot is written while it is read.
//
// Waiting: spin, then sched_yield, then futex in slices, each followed by a look at the abort flag, the deadline and
// the peer's process (pid and start time, so a reused pid is no life sign). Memory: an anonymous memory file (memfd),
// owner only (0600), sealed against resizing, reached by peers through the creator's /proc/<pid>/fd: it never has a
// name in any folder, so that no crash at any moment can leave one behind, no stale one can be found, and nobody can
// shrink it under a reader. Attaching checks magic, version, size, nonce, world. Fork: a child that inherited a
// transport may not use it (error), and its copy touches nothing shared when destroyed. Linux. Errors: TransportError.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "transport.h"

namespace tbik {

// The shared region, mapped once per process (threads that play ranks may share it).
class ShmRegion {
 public:
  // A region for `world` ranks and messages of `capacity` bytes. The creator's file stays open until close_file().
  static std::shared_ptr<ShmRegion> create(int world, int64_t capacity);

  // Maps the region that `token` describes. Errors: TransportError saying what differs.
  static std::shared_ptr<ShmRegion> attach(const std::string& token, int world);

  ~ShmRegion();
  ShmRegion(const ShmRegion&) = delete;
  ShmRegion& operator=(const ShmRegion&) = delete;

  // What a peer needs to attach: "tbik-shm <version> <pid> <start time> <fd> <bytes> <nonce>".
  const std::string& token() const { return token_; }
  void close_file();  // once every rank has attached

  struct Header;
  struct Line;
  struct Message;
  Header* header() const;
  Line* line(int rank) const;
  Message* message(int rank, uint64_t round) const;

 private:
  ShmRegion() = default;
  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
  int64_t slot_bytes_ = 0;
  int world_ = 0;
  int fd_ = -1;
  uint64_t fork_generation_ = 0;
  std::string token_;
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(std::shared_ptr<ShmRegion> region, int rank, int world)
      : ShmTransport(std::move(region), rank, world, {}, world) {}
  // The ranks are some of a larger group: shown[r] of shown_size is what messages call rank r.
  ShmTransport(std::shared_ptr<ShmRegion> region, int rank, int world, std::vector<int> shown, int shown_size);
  ~ShmTransport() override;

  const char* name() const override { return "shm"; }
  int64_t capacity() const override { return capacity_; }
  std::byte* outgoing() override;
  void exchange(const Tag& tag, const std::vector<Part>& parts, const Where& where) override;
  const std::byte* incoming(int peer, size_t part) const override;
  const Tag& tag(int peer) const override;
  void abort(const std::string& reason) override;
  void note(const char* activity) override;

  void leave() override;
  void require_usable(const Where& where);  // Errors: TransportError if somebody has given up

 private:
  void wait_for(int peer, const Where& where);
  std::string here(const Where& where) const;
  std::string shown(int rank) const;
  [[noreturn]] void fail(TransportFailure failure, const std::string& text);
  bool sleep(int peer, const Where& where, std::chrono::steady_clock::time_point start);
  std::string last_seen(int peer) const;

  std::shared_ptr<ShmRegion> region_;
  int64_t capacity_;
  uint64_t round_ = 0;  // of the last exchange
  const std::vector<Part>* parts_ = nullptr;
  bool broken_ = false;
  uint64_t fork_generation_;
  std::vector<int> shown_;
  int shown_size_;
};

// Changes in every child process; what it inherited compares it.
uint64_t fork_generation();

// "<boot id> <pid namespace> <network namespace> <host name>": two processes for which it is equal run on one host, see
// each other's pids and can share memory. Containers or namespaces that were given a network or a name of their own are
// hosts of their own, on the same kernel too: between them only sockets are used.
std::string host_identity();

}  // namespace tbik
