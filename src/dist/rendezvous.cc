// SPDX-License-Identifier: Apache-2.0
// Processes that find each other by a file: rank 0 says there where it listens, and a secret that
// only its run knows.
#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/random.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/check.h"
#include "core/quote.h"
#include "dist/connection.h"
#include "dist/socket_communicator.h"
#include "fovea/process_ranks.h"

namespace fovea {
namespace {

constexpr std::string_view kTitle = "fovea-rendezvous-1";
constexpr int kMaxRanks = 64;
// The other side of a connection that says nothing for as long as this is none of the ranks.
constexpr std::chrono::milliseconds kGreeting{1000}, kPause{20};

using Secret = std::array<char, 32>;  // hexadecimal

// A rank says hello, rank 0 answers. Both are sent as they are in memory.
struct Hello {
  Secret secret{};
  int32_t rank = 0, ranks = 0;
};
struct Answer {
  Secret secret{};
  std::array<char, 96> refusal{};  // empty: all ranks are there
};

struct Meeting {
  Secret secret{};
  uint16_t port = 0;
  std::vector<std::string> addresses;
};

Secret make_secret() {
  std::array<unsigned char, sizeof(Secret) / 2> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    fail(ErrorCode::io, "rendezvous: the system has no random numbers");
  }
  Secret secret;
  for (size_t i = 0; i < secret.size(); ++i) {
    secret[i] = "0123456789abcdef"[bytes[i / 2] >> (i % 2 * 4) & 15];
  }
  return secret;
}

std::string_view text_of(const Secret& secret) { return {secret.data(), secret.size()}; }

// Writes the whole file under another name first, so that nobody reads a part of it.
void write_meeting(const std::string& file, const Meeting& meeting) {
  const std::string text = fmt::format("{}\n{}\n{}\n{}\n", kTitle, text_of(meeting.secret),
                                       meeting.port, fmt::join(meeting.addresses, " "));
  const std::string part = fmt::format("{}.{}", file, text_of(meeting.secret).substr(0, 8));
  const int handle = open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const bool written =
      handle >= 0 && write(handle, text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
      fsync(handle) == 0;
  const int error = errno;
  if (handle >= 0) close(handle);
  if (written && std::rename(part.c_str(), file.c_str()) == 0) return;
  const std::string reason = std::generic_category().message(written ? errno : error);
  if (handle >= 0) unlink(part.c_str());
  fail(ErrorCode::io, "rendezvous file {} cannot be written: {}", printable(file), reason);
}

std::optional<Meeting> read_meeting(const std::string& file) {
  std::ifstream in(file);
  std::string title, secret, addresses;
  Meeting meeting;
  if (!(in >> title >> secret >> meeting.port) || title != kTitle) return {};
  if (secret.size() != meeting.secret.size()) return {};
  std::ranges::copy(secret, meeting.secret.begin());
  std::getline(in >> std::ws, addresses);
  std::istringstream words(addresses);
  for (std::string word; words >> word;) meeting.addresses.push_back(word);
  return meeting;
}

// Removes the file that rank 0 has written, unless a later run has replaced it.
class OwnFile {
 public:
  OwnFile(std::string file, const Meeting& meeting)
      : file_(std::move(file)), secret_(meeting.secret) {
    write_meeting(file_, meeting);
  }
  ~OwnFile() {
    const std::optional<Meeting> there = read_meeting(file_);
    if (there && there->secret == secret_) unlink(file_.c_str());
  }
  OwnFile(const OwnFile&) = delete;
  OwnFile& operator=(const OwnFile&) = delete;

 private:
  const std::string file_;
  const Secret secret_;
};

std::string refusal_of(const Hello& hello, const std::vector<Connection>& links) {
  const auto ranks = static_cast<int32_t>(links.size());
  if (hello.ranks != ranks) {
    return fmt::format("rank {} expects {} ranks, rank 0 expects {}", hello.rank, hello.ranks,
                       ranks);
  }
  if (hello.rank < 1 || hello.rank >= ranks || links[static_cast<size_t>(hello.rank)].is_open()) {
    return fmt::format("rank {} is here already", hello.rank);
  }
  return {};
}

void answer(const Connection& link, const Secret& secret, const std::string& refusal) {
  Answer answer{secret, {}};
  refusal.copy(answer.refusal.data(), answer.refusal.size() - 1);
  (void)link.send(&answer, sizeof(answer), after(kGreeting));
}

[[noreturn]] void fail_to_meet(const RendezvousOptions& options, const std::string& absent) {
  fail(ErrorCode::device_failure, "rendezvous of rank {} by {}: {} within {:g} s", options.rank,
       printable(options.file), absent,
       std::chrono::duration<double>(options.meeting_timeout).count());
}

// Returns the connections of all other ranks. A rank that is refused is told why.
std::vector<Connection> await_ranks(const RendezvousOptions& options) {
  const Deadline end = after(options.meeting_timeout);
  const Listener listener;
  const Meeting meeting{make_secret(), listener.port(), own_addresses()};
  const OwnFile file(options.file, meeting);
  std::vector<Connection> links(static_cast<size_t>(options.ranks));
  for (int here = 1; here < options.ranks;) {
    Connection link = listener.accept(end);
    if (!link.is_open()) {
      std::vector<size_t> absent;
      for (size_t rank = 1; rank < links.size(); ++rank) {
        if (!links[rank].is_open()) absent.push_back(rank);
      }
      fail_to_meet(options, fmt::format("rank {} did not come", fmt::join(absent, ", ")));
    }
    Hello hello;
    if (!link.receive(&hello, sizeof(hello), after(kGreeting)).empty()) continue;
    if (hello.secret != meeting.secret) continue;
    if (const std::string refusal = refusal_of(hello, links); !refusal.empty()) {
      answer(link, meeting.secret, refusal);
      continue;
    }
    links[static_cast<size_t>(hello.rank)] = std::move(link);
    ++here;
  }
  for (size_t rank = 1; rank < links.size(); ++rank) answer(links[rank], meeting.secret, {});
  return links;
}

// Returns the connection to the rank 0 that knows the secret, or a closed one.
Connection greet(const Meeting& meeting, const RendezvousOptions& options, Deadline end) {
  for (const std::string& address : meeting.addresses) {
    Connection link = connect_to(address, meeting.port, std::min(end, after(kGreeting)));
    if (!link.is_open()) continue;
    const Hello hello{meeting.secret, options.rank, options.ranks};
    if (!link.send(&hello, sizeof(hello), after(kGreeting)).empty()) continue;
    Answer answer;
    if (!link.receive(&answer, sizeof(answer), end).empty()) continue;
    if (answer.secret != meeting.secret) continue;
    answer.refusal.back() = '\0';
    check_argument(answer.refusal.front() == '\0', "rendezvous of rank {} by {}: {}", options.rank,
                   printable(options.file), answer.refusal.data());
    return link;
  }
  return {};
}

Connection find_rank_0(const RendezvousOptions& options) {
  const Deadline end = after(options.meeting_timeout);
  bool read = false;
  for (; std::chrono::steady_clock::now() < end; std::this_thread::sleep_for(kPause)) {
    const std::optional<Meeting> meeting = read_meeting(options.file);
    if (!meeting) continue;
    read = true;
    if (Connection link = greet(*meeting, options, end); link.is_open()) return link;
  }
  fail_to_meet(options, read ? "the rank 0 that wrote the file did not answer"
                             : "rank 0 wrote no such file");
}

}  // namespace

std::unique_ptr<Communicator> meet_by_file(const RendezvousOptions& options) {
  const int rank = options.rank, ranks = options.ranks;
  check_argument(!options.file.empty(), "rendezvous file is empty");
  check_argument(ranks >= 1 && ranks <= kMaxRanks, "ranks is {}, must be in [1, {}]", ranks,
                 kMaxRanks);
  check_argument(rank >= 0 && rank < ranks, "rank is {}, must be in [0, {})", rank, ranks);
  check_argument(options.meeting_timeout.count() > 0 && options.timeout.count() > 0,
                 "meeting_timeout is {} ms and timeout {} ms, must be positive",
                 options.meeting_timeout.count(), options.timeout.count());
  std::vector<Connection> links;
  if (rank == 0) {
    links = await_ranks(options);
  } else {
    links.push_back(find_rank_0(options));
  }
  return make_socket_communicator(rank, ranks, std::move(links), options.timeout);
}

}  // namespace fovea
