// See transport_tcp.h.
#include "transport_tcp.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

namespace tbik {

using Clock = std::chrono::steady_clock;

struct TcpTransport::Header {
  uint32_t magic;
  uint32_t kind;
  uint64_t round;
  Tag tag;
  int64_t payload;
};

namespace {

constexpr uint32_t kMagic = 0x6b696274;  // "tbik"
enum Kind : uint32_t { kData = 1, kAbort = 2 };
constexpr int64_t kLargestReason = 1024;
constexpr std::chrono::microseconds kYielding{100};
constexpr std::chrono::milliseconds kSlice{50};
constexpr std::chrono::milliseconds kReasonWait{100};  // for the rest of a peer's last words

// Every socket of this process. A forked child closes its copies: it can neither use them nor may it keep them open.
std::mutex g_sockets_mutex;
std::vector<int>* g_sockets = nullptr;

void watch_sockets(int fd) {
  static std::once_flag once;
  std::call_once(once, [] {
    g_sockets = new std::vector<int>;
    pthread_atfork([] { g_sockets_mutex.lock(); }, [] { g_sockets_mutex.unlock(); },
                   [] {
                     for (const int inherited : *g_sockets) ::close(inherited);
                     g_sockets->clear();
                     g_sockets_mutex.unlock();
                   });
  });
  const std::lock_guard<std::mutex> lock(g_sockets_mutex);
  g_sockets->push_back(fd);
}

void close_socket(int fd) {
  const std::lock_guard<std::mutex> lock(g_sockets_mutex);
  g_sockets->erase(std::remove(g_sockets->begin(), g_sockets->end(), fd), g_sockets->end());
  ::close(fd);
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

std::string seconds(Clock::duration d) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f s", std::chrono::duration<double>(d).count());
  return text;
}

}  // namespace

struct TcpTransport::Stream {
  int peer = -1;
  int fd = -1;

  // The frame on its way out.
  Header out{};
  std::vector<iovec> rest;  // of the frame, first piece first
  size_t at = 0;
  bool sent = true;
  bool refused = false;  // the peer takes nothing any more; what it has sent is read before that counts

  // The frame on its way in.
  Header in{};
  int64_t got = 0;  // bytes of it, header included
  std::byte* payload = nullptr;
  int64_t expected = 0;
  bool received = true;
  bool watched = false;  // received: what comes next may be an abort
  std::string gone;      // why the rest of the round will not come
};

TcpTransport::TcpTransport(std::vector<int> sockets, int rank, int64_t capacity,
                           const std::shared_ptr<ShmRegion>& region, std::vector<int> local)
    : Transport(rank, static_cast<int>(sockets.size())),
      capacity_(capacity),
      local_(std::move(local)),
      fork_generation_(fork_generation()) {
  static_assert(sizeof(Header) == kHeaderBytes);
  local_index_.assign(sockets.size(), -1);
  stream_of_.assign(sockets.size(), nullptr);
  bytes_sent_.assign(sockets.size(), 0);
  for (size_t i = 0; i < local_.size(); ++i) local_index_[static_cast<size_t>(local_[i])] = static_cast<int>(i);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ >= 0) watch_sockets(wake_);
  for (size_t p = 0; p < sockets.size(); ++p) {
    if (sockets[p] < 0) continue;
    watch_sockets(sockets[p]);
    const int on = 1;
    setsockopt(sockets[p], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // not on a Unix socket, where nothing waits
    streams_.push_back(std::make_unique<Stream>());
    streams_.back()->peer = static_cast<int>(p);
    streams_.back()->fd = sockets[p];
    stream_of_[p] = streams_.back().get();
  }
  for (int p = 0; p < size_; ++p) {
    const bool reached = stream_of_[static_cast<size_t>(p)] != nullptr;
    const bool shared = region != nullptr && local_index_[static_cast<size_t>(p)] >= 0;
    if (p != rank_ && reached == shared) {
      throw TransportError(TransportFailure::kMisuse,
                           "tcp: rank " + std::to_string(p) + " needs a socket or shared " + "memory, and not both");
    }
  }
  if (region) {
    shm_ = std::make_unique<ShmTransport>(region, local_index_[static_cast<size_t>(rank)],
                                          static_cast<int>(local_.size()), local_, size_);
    if (shm_->capacity() < capacity_) {
      throw TransportError(TransportFailure::kMisuse, "tcp: the shared memory has messages of " +
                                                          std::to_string(shm_->capacity()) + " bytes, expected " +
                                                          std::to_string(capacity_));
    }
  }
}

TcpTransport::~TcpTransport() {
  if (fork_generation_ != fork_generation()) return;  // the child's copies were closed when it was forked
  for (const auto& stream : streams_) {
    if (stream->fd >= 0) close_socket(stream->fd);
  }
  if (wake_ >= 0) close_socket(wake_);
}

void TcpTransport::leave() {
  if (fork_generation_ != fork_generation()) return;
  if (shm_) shm_->leave();
  const std::lock_guard<std::mutex> lock(io_mutex_);
  broken_ = true;
  for (const auto& stream : streams_) ::shutdown(stream->fd, SHUT_WR);  // what was sent still arrives
}

std::byte* TcpTransport::outgoing() {
  if (shm_) return shm_->outgoing();
  std::vector<std::byte>& buffer = messages_[(round_ + 1) % 2];
  if (buffer.empty()) buffer.resize(static_cast<size_t>(capacity_));
  return buffer.data();
}

const Tag& TcpTransport::tag(int peer) const {
  const Stream* stream = stream_of_[static_cast<size_t>(peer)];
  if (stream != nullptr) return stream->in.tag;
  return peer == rank_ ? tag_ : shm_->tag(local_index_[static_cast<size_t>(peer)]);
}

const std::byte* TcpTransport::incoming(int peer, size_t part) const {
  if (peer == rank_) return own_ + (*parts_)[part].to[static_cast<size_t>(rank_)].offset;
  if (stream_of_[static_cast<size_t>(peer)] == nullptr) {
    return shm_->incoming(local_index_[static_cast<size_t>(peer)], part);
  }
  return in_.data() + starts_[static_cast<size_t>(peer) * parts_->size() + part];
}

std::vector<int64_t> TcpTransport::bytes_sent() const {
  const std::lock_guard<std::mutex> lock(io_mutex_);
  return bytes_sent_;
}

void TcpTransport::note(const char* activity) {
  if (shm_) shm_->note(activity);
}

int TcpTransport::awaited() const {
  const int local = shm_ ? shm_->awaited() : -1;
  return local >= 0 ? local : Transport::awaited();
}

void TcpTransport::exchange(const Tag& tag, const std::vector<Part>& parts, const Where& where) {
  const std::unique_lock<std::mutex> lock(io_mutex_);
  require_usable(where);
  const Clock::time_point start = Clock::now();
  own_ = outgoing();
  ++round_;
  parts_ = &parts;
  tag_ = tag;
  start_frames(tag, parts, own_);
  for (const auto& stream : streams_) push(*stream);
  if (shm_) {
    // Peers at sockets read meanwhile what the kernel has taken; the rest follows below.
    local_parts_.resize(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      local_parts_[i].to.clear();
      local_parts_[i].from.clear();
      if (parts[i].to.empty()) continue;
      for (const int p : local_) {
        local_parts_[i].to.push_back(parts[i].to[static_cast<size_t>(p)]);
        local_parts_[i].from.push_back(parts[i].from[static_cast<size_t>(p)]);
        if (p != rank_) bytes_sent_[static_cast<size_t>(p)] += parts[i].to[static_cast<size_t>(p)].size;
      }
    }
    shm_->set_limit(limit_);
    try {
      shm_->exchange(tag, local_parts_, where);
    } catch (const TransportError& error) {
      fail(error.failure, error.what());
    }
  }
  Clock::time_point idle = start;
  Clock::time_point lost{};  // when the first stream ended; for a moment others may still say why
  while (true) {
    bool done = true;
    bool pending = false;
    bool moved = false;
    const bool losing = lost != Clock::time_point{};
    for (const auto& stream : streams_) {
      if (!stream->gone.empty()) continue;
      if (!stream->sent && !stream->refused) moved |= push(*stream);
      if (!stream->received) moved |= pull(*stream, where);
      if (stream->received && (losing || stream->refused)) look_ahead(*stream, where);
      if (stream->received && !stream->sent && stream->refused) stream->gone = "takes no more bytes";
      if (!stream->gone.empty() && !losing) lost = Clock::now();
      done = done && stream->sent && stream->received && stream->gone.empty();
      pending = pending || !stream->sent || !stream->received;
    }
    if (done && !losing) break;
    const Clock::time_point now = Clock::now();
    if (lost != Clock::time_point{} && (!pending || now - lost > kReasonWait)) fail_gone(where);
    if (moved) {
      idle = now;
    } else if (now - idle < kYielding) {
      sched_yield();
    } else {
      const auto late = std::find_if(streams_.begin(), streams_.end(),
                                     [](const auto& stream) { return !stream->sent || !stream->received; });
      awaited_.store(late == streams_.end() ? -1 : (*late)->peer, std::memory_order_relaxed);
      wait(where, start);
      awaited_.store(-1, std::memory_order_relaxed);
    }
  }
}

void TcpTransport::start_frames(const Tag& tag, const std::vector<Part>& parts, const std::byte* own) {
  starts_.assign(static_cast<size_t>(size_) * parts.size(), 0);
  int64_t total = 0;
  for (const auto& stream : streams_) {
    const size_t p = static_cast<size_t>(stream->peer);
    stream->rest.assign(1, {&stream->out, sizeof(Header)});
    int64_t payload = 0;
    const int64_t begin = total;
    for (size_t i = 0; i < parts.size(); ++i) {
      starts_[p * parts.size() + i] = total;
      if (parts[i].to.empty()) continue;
      const Piece& piece = parts[i].to[p];
      if (piece.size > 0) {
        const std::byte* at = piece.at != nullptr ? piece.at : own + piece.offset;
        stream->rest.push_back({const_cast<std::byte*>(at), static_cast<size_t>(piece.size)});
        payload += piece.size;
      }
      total += parts[i].from[p].size;
    }
    stream->out = {kMagic, kData, round_, tag, payload};
    stream->at = 0;
    stream->sent = false;
    stream->got = 0;
    stream->expected = total - begin;
    stream->received = false;
    stream->watched = true;
    stream->gone.clear();
    bytes_sent_[p] += payload;
  }
  if (static_cast<int64_t>(in_.size()) < total) in_.resize(static_cast<size_t>(total));
  for (const auto& stream : streams_) {
    if (stream->expected > 0) {
      // The parts of one peer lie one after another, as they do in its frame.
      stream->payload = in_.data() + starts_[static_cast<size_t>(stream->peer) * parts.size()];
    }
  }
}

// True if bytes went out.
bool TcpTransport::push(Stream& stream) {
  bool moved = false;
  while (!stream.sent && !stream.refused) {
    msghdr message{};
    message.msg_iov = stream.rest.data() + stream.at;
    message.msg_iovlen = stream.rest.size() - stream.at;
    ssize_t n = sendmsg(stream.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
      if (would_block()) return moved;
      stream.refused = true;
      return true;
    }
    moved = true;
    while (n > 0) {
      iovec& first = stream.rest[stream.at];
      const size_t taken = std::min(first.iov_len, static_cast<size_t>(n));
      first.iov_base = static_cast<std::byte*>(first.iov_base) + taken;
      first.iov_len -= taken;
      n -= static_cast<ssize_t>(taken);
      if (first.iov_len == 0) ++stream.at;
    }
    stream.sent = stream.at == stream.rest.size();
  }
  return moved;
}

// True if bytes came in.
bool TcpTransport::pull(Stream& stream, const Where& where) {
  constexpr int64_t kHead = sizeof(Header);
  bool moved = false;
  while (!stream.received) {
    void* to;
    int64_t wanted;
    if (stream.got < kHead) {
      to = reinterpret_cast<std::byte*>(&stream.in) + stream.got;
      wanted = kHead - stream.got;
    } else {
      const int64_t at = stream.got - kHead;
      wanted = stream.in.payload - at;
      if (stream.in.tag.call != tag_.call) {
        // Another call: its bytes are read and dropped, so that the ranks stay in step; the caller compares the tags.
        discarded_.resize(1 << 16);
        to = discarded_.data();
        wanted = std::min<int64_t>(wanted, 1 << 16);
      } else {
        to = stream.payload + at;
      }
    }
    const ssize_t n = wanted > 0 ? recv(stream.fd, to, static_cast<size_t>(wanted), MSG_DONTWAIT) : 0;
    if (n < 0 && would_block()) return moved;
    if (wanted > 0 && n <= 0) {
      stream.gone = n == 0 ? "has closed its connection" : std::string("is cut off: ") + std::strerror(errno);
      return moved;
    }
    moved = true;
    const bool in_header = stream.got < kHead;
    stream.got += n;
    if (in_header && stream.got == kHead) {
      if (stream.in.magic != kMagic || (stream.in.kind != kData && stream.in.kind != kAbort) || stream.in.payload < 0) {
        fail(TransportFailure::kMisuse, describe(where, rank_, size_) + ": what comes from rank " +
                                            std::to_string(stream.peer) + " is no frame of this transport");
      }
      if (stream.in.kind == kAbort) fail_aborted(stream, where, stream.in.payload);
      const bool same = stream.in.tag.call == tag_.call;
      if (stream.in.round != round_ || (same && stream.in.payload != stream.expected)) {
        fail(TransportFailure::kMisuse, describe(where, rank_, size_) + ": rank " + std::to_string(stream.peer) +
                                            " sent message " + std::to_string(stream.in.round) + " of " +
                                            std::to_string(stream.in.payload) + " bytes, expected " +
                                            std::to_string(round_) + " of " + std::to_string(stream.expected));
      }
    }
    if (stream.got >= kHead && stream.got == kHead + stream.in.payload) stream.received = true;
  }
  return moved;
}

// A peer whose frame is here may send an abort next; its next data stays where it is.
void TcpTransport::look_ahead(Stream& stream, const Where& where) {
  Header next;
  const ssize_t n = recv(stream.fd, &next, sizeof next, MSG_DONTWAIT | MSG_PEEK);
  if (n < 0 && would_block()) return;
  if (n == static_cast<ssize_t>(sizeof next) && next.magic == kMagic && next.kind == kAbort) {
    if (recv(stream.fd, &next, sizeof next, MSG_DONTWAIT) == n) fail_aborted(stream, where, next.payload);
  }
  // Data of the next round, or the end of a rank that has finished its calls: no news for this round. (A part of a
  // header stays watched by the deadline only.)
  stream.watched = false;
}

// One slice; throws at the deadline or when somebody has given up.
void TcpTransport::wait(const Where& where, Clock::time_point start) {
  const Clock::duration elapsed = Clock::now() - start;
  if (elapsed >= limit_) {
    fail(TransportFailure::kTimeout,
         describe(where, rank_, size_) + ": waited " + seconds(elapsed) + " (limit " +
             seconds(std::chrono::duration_cast<Clock::duration>(limit_)) + ") for " + progress() +
             ". Such a rank is stopped, cut off or busy, or makes other calls, or fewer, than this rank");
  }
  if (shm_) {
    try {
      shm_->require_usable(where);
    } catch (const TransportError& error) {
      fail(error.failure, error.what());
    }
  }
  std::vector<pollfd> fds;
  std::vector<Stream*> polled;
  for (const auto& stream : streams_) {
    if (!stream->gone.empty()) continue;
    short events = 0;
    if (!stream->sent && !stream->refused) events |= POLLOUT;
    if (!stream->received || stream->watched) events |= POLLIN;
    if (events == 0) continue;
    fds.push_back({stream->fd, events, 0});
    polled.push_back(stream.get());
  }
  fds.push_back({wake_, POLLIN, 0});
  const auto slice = std::clamp<std::chrono::nanoseconds>(limit_ - elapsed, std::chrono::milliseconds(1), kSlice);
  poll(fds.data(), fds.size(), static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(slice).count()));
  if (aborted_.load()) require_usable(where);
  for (size_t i = 0; i < polled.size(); ++i) {
    if (polled[i]->received && polled[i]->watched && fds[i].revents != 0) look_ahead(*polled[i], where);
  }
}

// "rank 2 (its message: nothing of it has come) and rank 3 (it has not taken this rank's message)"
std::string TcpTransport::progress() const {
  std::string text;
  for (const auto& stream : streams_) {
    if (stream->sent && stream->received) continue;
    text += (text.empty() ? "rank " : " and rank ") + std::to_string(stream->peer);
    if (!stream->received) {
      text += stream->got == 0 ? " (nothing of its message " + std::to_string(round_) + " has come)"
                               : " (" + std::to_string(stream->got) + " bytes of its message " +
                                     std::to_string(round_) + " have come)";
    } else {
      text += " (it has not taken all of this rank's message " + std::to_string(round_) + ")";
    }
  }
  return text;
}

void TcpTransport::require_usable(const Where& where) {
  if (fork_generation_ != fork_generation()) {
    throw TransportError(TransportFailure::kMisuse,
                         "tcp: " + describe(where, rank_, size_) +
                             ": this process was forked after the group was made; a group belongs to the process that "
                             "made it. Make a new group in the child");
  }
  if (aborted_.load()) {
    std::string reason;
    {
      const std::lock_guard<std::mutex> lock(reason_mutex_);
      reason = reason_;
    }
    const bool first = !broken_;
    broken_ = true;
    if (!told_) send_abort();
    throw TransportError(TransportFailure::kAborted,
                         "tcp: " + describe(where, rank_, size_) +
                             (first ? ": this rank has given up the group: " + reason
                                    : ": an earlier call on this group failed here (" + reason +
                                          "). Destroy the group and make a new one"));
  }
  if (broken_) {
    throw TransportError(TransportFailure::kAborted, "tcp: " + describe(where, rank_, size_) +
                                                         ": the group was left or has failed here. Destroy it and "
                                                         "make a new one");
  }
}

// Any thread. Whoever holds the streams tells the peers; if nobody does, this thread.
void TcpTransport::abort(const std::string& reason) {
  if (fork_generation_ != fork_generation()) return;
  {
    const std::lock_guard<std::mutex> lock(reason_mutex_);
    if (reason_.empty()) reason_ = reason.substr(0, kLargestReason - 64);
    aborted_.store(true);
  }
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof one) < 0) errno = 0;  // full: somebody is being woken already
  if (shm_) shm_->abort(reason);
  // An exchange that is under way ends soon, having told the peers or just finished.
  for (int i = 0; i < 20; ++i) {
    const std::unique_lock<std::mutex> lock(io_mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
      if (!told_) send_abort();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// Last words to every peer. Inside a frame there is no room for them: then the end of the stream has to say it.
void TcpTransport::send_abort() {
  told_ = true;
  std::string reason;
  {
    const std::lock_guard<std::mutex> lock(reason_mutex_);
    reason = reason_;
  }
  Header header{kMagic, kAbort, round_ + 1, tag_, static_cast<int64_t>(reason.size())};
  for (const auto& stream : streams_) {
    iovec rest[] = {{&header, sizeof header}, {reason.data(), reason.size()}};
    msghdr message{};
    message.msg_iov = rest;
    message.msg_iovlen = 2;
    const bool whole = stream->sent && sendmsg(stream->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) ==
                                           static_cast<ssize_t>(sizeof header + reason.size());
    ::shutdown(stream->fd, whole ? SHUT_WR : SHUT_RDWR);
  }
}

void TcpTransport::fail(TransportFailure failure, const std::string& text) {
  broken_ = true;
  {
    const std::lock_guard<std::mutex> lock(reason_mutex_);
    if (reason_.empty()) reason_ = text.substr(0, kLargestReason - 64);
    aborted_.store(true);
  }
  if (!told_) send_abort();
  if (shm_) shm_->abort(text);
  throw TransportError(failure, text.compare(0, 5, "shm: ") == 0 ? text : "tcp: " + text);
}

void TcpTransport::fail_gone(const Where& where) {
  std::string text;
  for (const auto& stream : streams_) {
    if (stream->gone.empty()) continue;
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(stream->peer) + " " + stream->gone;
  }
  fail(TransportFailure::kPeerGone, describe(where, rank_, size_) + ": " + text +
                                        ": the process has ended or has left the group (destroyed or shut down) "
                                        "before this call was over. Look at the log of the rank that ended first");
}

// The peer's last words, `size` bytes, follow in the stream.
void TcpTransport::fail_aborted(const Stream& stream, const Where& where, int64_t size) {
  std::string reason(static_cast<size_t>(std::clamp<int64_t>(size, 0, kLargestReason)), ' ');
  pollfd more{stream.fd, POLLIN, 0};
  size_t got = 0;
  while (got < reason.size() && poll(&more, 1, static_cast<int>(kReasonWait.count())) > 0) {
    const ssize_t n = recv(stream.fd, reason.data() + got, reason.size() - got, MSG_DONTWAIT);
    if (n <= 0) break;
    got += static_cast<size_t>(n);
  }
  fail(TransportFailure::kAborted, describe(where, rank_, size_) + ": rank " + std::to_string(stream.peer) +
                                       " has given up this group. It says: " + reason.substr(0, got));
}

}  // namespace tbik
