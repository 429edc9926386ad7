// Transport over stream sockets, one per pair of ranks; ranks of one host may share memory instead.
//
//   frame   [ kind, round, tag, payload size | pieces for this peer, part after part ]     one per peer and round
//   kind    data, or abort: the sender has given up, the payload says why
//
// A round is a frame to and from every peer, however little it carries, so that all ranks compare all tags in every
// call and a dead peer is seen at once (its kernel closes the stream). The caller's thread moves everything itself:
// sends what the kernel takes, receives what has come, then polls in slices, each followed by a look at the abort flag
// (of the shared memory too) and the deadline. exchange() ends when every byte of the round has been handed to the
// kernel and every frame of the round has come: no stream holds bytes of more than the next round, and the rank that is
// furthest behind never waits for one that is ahead. Pieces are sent from where they lie and never packed.
//
// Whoever made the sockets has shown that the other end is the right rank of the right group (tbik/sockets.py): nothing
// is authenticated or encrypted here. A forked child closes its copies, so that a dead rank's children cannot keep its
// streams open. Linux. Errors: TransportError, naming the peer. Bytes only; the machine's byte order (x86, Arm:
// little).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport.h"
#include "transport_shm.h"

namespace tbik {

class TcpTransport final : public Transport {
 public:
  // sockets[p]: a connected stream to rank p, ours from now on; -1 for this rank and for those it shares memory with.
  // local: the ranks of this host in ascending order, `rank` among them, if they share `region`; else empty.
  // capacity: the same on all ranks; at most that of the region.
  TcpTransport(std::vector<int> sockets, int rank, int64_t capacity, const std::shared_ptr<ShmRegion>& region,
               std::vector<int> local);
  ~TcpTransport() override;

  const char* name() const override { return shm_ ? "tcp+shm" : "tcp"; }
  int64_t capacity() const override { return capacity_; }
  std::byte* outgoing() override;
  bool lends() const override { return shm_ == nullptr; }
  void exchange(const Tag& tag, const std::vector<Part>& parts, const Where& where) override;
  const std::byte* incoming(int peer, size_t part) const override;
  const Tag& tag(int peer) const override;
  void abort(const std::string& reason) override;
  void note(const char* activity) override;
  void leave() override;
  int awaited() const override;
  std::vector<int64_t> bytes_sent() const override;

  static constexpr int64_t kHeaderBytes = 88;  // of a frame

 private:
  struct Header;
  struct Stream;

  void require_usable(const Where& where);
  void start_frames(const Tag& tag, const std::vector<Part>& parts, const std::byte* own);
  bool push(Stream& stream);
  bool pull(Stream& stream, const Where& where);
  void look_ahead(Stream& stream, const Where& where);
  void wait(const Where& where, std::chrono::steady_clock::time_point start);
  [[noreturn]] void fail(TransportFailure failure, const std::string& text);
  [[noreturn]] void fail_gone(const Where& where);
  [[noreturn]] void fail_aborted(const Stream& stream, const Where& where, int64_t size);
  void send_abort();
  std::string progress() const;

  const int64_t capacity_;
  std::vector<int> local_;        // ranks, ascending
  std::vector<int> local_index_;  // of every rank; -1: reached by a socket
  std::unique_ptr<ShmTransport> shm_;
  std::vector<Part> local_parts_;
  std::vector<std::unique_ptr<Stream>> streams_;  // of every rank with a socket
  std::vector<Stream*> stream_of_;
  std::vector<std::byte> messages_[2];
  std::vector<std::byte> in_;
  std::vector<std::byte> discarded_;
  std::vector<int64_t> starts_;  // of part i from peer p in in_: [p][i]
  std::vector<int64_t> bytes_sent_;
  const std::vector<Part>* parts_ = nullptr;
  const std::byte* own_ = nullptr;
  Tag tag_;
  uint64_t round_ = 0;
  bool broken_ = false;
  bool told_ = false;  // the peers have heard that this rank has given up
  uint64_t fork_generation_;
  int wake_ = -1;

  mutable std::mutex io_mutex_;  // held by whoever touches the streams
  std::mutex reason_mutex_;
  std::atomic<bool> aborted_{false};
  std::string reason_;
};

}  // namespace tbik
