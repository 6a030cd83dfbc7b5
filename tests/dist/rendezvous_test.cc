// SPDX-License-Identifier: Apache-2.0
// Ranks that find each other by a file and communicate over TCP; here they are threads.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "dist/collective_checks.h"
#include "dist/connection.h"
#include "dist/run_ranks.h"
#include "fovea/nccl_communicator.h"
#include "fovea/process_ranks.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using std::chrono::milliseconds;
using test::expect_error;
using test::expect_invalid;

class Rendezvous : public testing::Test {
 protected:
  ~Rendezvous() override { std::filesystem::remove_all(folder_); }

  RendezvousOptions options(int rank, int ranks) const {
    return {.file = file_, .rank = rank, .ranks = ranks, .meeting_timeout = milliseconds(5000)};
  }
  // Rank 0 comes last, so that the others wait for the file.
  std::vector<std::unique_ptr<Communicator>> meet(int ranks, milliseconds timeout) const {
    std::vector<std::unique_ptr<Communicator>> met(static_cast<size_t>(ranks));
    std::vector<std::exception_ptr> thrown(met.size());
    std::vector<std::thread> threads;
    for (int rank = ranks; rank-- > 0;) {
      threads.emplace_back([&, rank] {
        RendezvousOptions own = options(rank, ranks);
        own.timeout = timeout;
        try {
          met[static_cast<size_t>(rank)] = meet_by_file(own);
        } catch (...) {
          thrown[static_cast<size_t>(rank)] = std::current_exception();
        }
      });
      if (rank == 1) std::this_thread::sleep_for(milliseconds(50));
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : thrown) {
      if (error) std::rethrow_exception(error);
    }
    return met;
  }
  std::vector<std::unique_ptr<Communicator>> meet(int ranks) const {
    return meet(ranks, milliseconds(10'000));
  }
  void write_file(const std::string& text) const { std::ofstream(file_) << text; }
  std::string read_file() const {
    std::ifstream in(file_);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  const std::string folder_ = [] {
    std::string name = std::filesystem::temp_directory_path() / "fovea_rendezvous_XXXXXX";
    return std::string(mkdtemp(name.data()));
  }();
  const std::string file_ = folder_ + "/file";
};

TEST_F(Rendezvous, RanksPassAllChecks) {
  for (const int ranks : {1, 2, 4}) {
    const auto met = meet(ranks);
    EXPECT_EQ(met[0]->name(), "tcp");
    for (const auto& thrown : test::run_ranks(met, test::check_collectives)) {
      if (thrown) std::rethrow_exception(thrown);
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder_)) << "rank 0 has left files";
  }
}

TEST_F(Rendezvous, LargeArraysPass) {
  const auto met = meet(3);
  const auto body = [](Communicator& ranks) {
    std::vector<float> values(3'000'001, static_cast<float>(ranks.rank() + 1));
    ranks.all_reduce(values.data(), values.data(), static_cast<int64_t>(values.size()), DType::f32,
                     ReduceOp::sum);
    EXPECT_EQ(values.front(), 6);
    EXPECT_EQ(values.back(), 6);
  };
  for (const auto& thrown : test::run_ranks(met, body)) {
    if (thrown) std::rethrow_exception(thrown);
  }
}

TEST_F(Rendezvous, OnlyTheOwnerReadsTheSecret) {
  std::thread rank0([&] { (void)meet_by_file(options(0, 2)); });
  struct stat status {};
  while (stat(file_.c_str(), &status) != 0) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  (void)meet_by_file(options(1, 2));
  rank0.join();
}

// A run that was killed has left its file; nobody listens there.
TEST_F(Rendezvous, RanksWaitUntilAStaleFileIsReplaced) {
  write_file("fovea-rendezvous-1\n" + std::string(32, '0') + "\n9\n127.0.0.1\n");
  EXPECT_EQ(meet(2).size(), 2u);
  write_file("something else");
  EXPECT_EQ(meet(2).size(), 2u);
}

// Rank 0 of a new run has the port of an old one, so it answers, but to its own secret only.
TEST_F(Rendezvous, AnOldSecretIsNotAccepted) {
  std::thread rank0([&] { (void)meet_by_file(options(0, 2)); });
  std::string text;
  while ((text = read_file()).empty()) std::this_thread::sleep_for(milliseconds(1));
  const size_t secret = text.find('\n') + 1;
  std::string stale = text;
  for (size_t i = 0; i < 32; ++i) stale[secret + i] = 'f';
  write_file(stale);
  RendezvousOptions hasty = options(1, 2);
  hasty.meeting_timeout = milliseconds(200);
  expect_error(ErrorCode::device_failure, "the rank 0 that wrote the file did not answer",
               [&] { (void)meet_by_file(hasty); });
  write_file(text);
  (void)meet_by_file(options(1, 2));
  rank0.join();
}

// Both families reach rank 0, whichever its socket has.
TEST_F(Rendezvous, RanksMeetAtAddressesOfBothFamilies) {
  const std::vector<std::string> own = own_addresses();
  for (const std::string address : {"127.0.0.1", "::1"}) {
    if (std::ranges::find(own, address) == own.end()) continue;  // the machine has no IPv6
    SCOPED_TRACE(address);
    std::thread rank0([&] { (void)meet_by_file(options(0, 2)); });
    std::string text;
    while ((text = read_file()).empty()) std::this_thread::sleep_for(milliseconds(1));
    text.erase(text.find_last_of('\n', text.size() - 2) + 1);
    write_file(text + address + '\n');
    EXPECT_NO_THROW((void)meet_by_file(options(1, 2)));
    rank0.join();
  }
}

TEST(Connection, AListenerWithoutIpv6IsReachedByIpv4) {
  const Listener listener(false);
  const Connection there = connect_to("127.0.0.1", listener.port(), after(milliseconds(1000)));
  const Connection here = listener.accept(after(milliseconds(1000)));
  ASSERT_TRUE(there.is_open() && here.is_open());
  int32_t value = 5, got = 0;
  EXPECT_EQ(there.send(&value, sizeof(value), after(milliseconds(1000))), "");
  EXPECT_EQ(here.receive(&got, sizeof(got), after(milliseconds(1000))), "");
  EXPECT_EQ(got, value);
  EXPECT_FALSE(connect_to("::1", listener.port(), after(milliseconds(1000))).is_open());
  EXPECT_FALSE(connect_to("localhost", listener.port(), after(milliseconds(1000))).is_open())
      << "names are not looked up";
}

TEST_F(Rendezvous, AbsentRanksAreNamed) {
  RendezvousOptions first = options(0, 3), second = options(2, 3);
  first.meeting_timeout = second.meeting_timeout = milliseconds(300);
  expect_error(ErrorCode::device_failure, {file_, "rank 1, 2 did not come within 0.3 s"},
               [&] { (void)meet_by_file(first); });
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  expect_error(ErrorCode::device_failure,
               {"rendezvous of rank 2 by " + file_, "rank 0 wrote no such file within 0.3 s"},
               [&] { (void)meet_by_file(second); });
}

TEST_F(Rendezvous, RanksThatExpectOthersAreRefused) {
  RendezvousOptions first = options(0, 2);
  first.meeting_timeout = milliseconds(1000);
  std::thread rank0([&] {
    expect_error(ErrorCode::device_failure, "rank 1 did not come",
                 [&] { (void)meet_by_file(first); });
  });
  expect_invalid("rank 2 expects 3 ranks, rank 0 expects 2",
                 [&] { (void)meet_by_file(options(2, 3)); });
  rank0.join();
  std::thread again([&] { (void)meet_by_file(options(0, 3)); });
  std::thread rank1([&] { (void)meet_by_file(options(1, 3)); });
  while (!std::filesystem::exists(file_)) std::this_thread::sleep_for(milliseconds(1));
  std::this_thread::sleep_for(milliseconds(200));  // rank 1 is there
  expect_invalid("rank 1 is here already", [&] { (void)meet_by_file(options(1, 3)); });
  (void)meet_by_file(options(2, 3));
  again.join();
  rank1.join();
}

TEST_F(Rendezvous, ArgumentsAreNamed) {
  expect_invalid("rank is 2, must be in [0, 2)", [&] { (void)meet_by_file(options(2, 2)); });
  expect_invalid("ranks is 65, must be in [1, 64]", [&] { (void)meet_by_file(options(0, 65)); });
  expect_invalid("rendezvous file is empty", [&] { (void)meet_by_file({.ranks = 2}); });
  RendezvousOptions nowhere = options(0, 2);
  nowhere.file = folder_ + "/none/file";
  expect_error(ErrorCode::io, "none/file cannot be written: No such file",
               [&] { (void)meet_by_file(nowhere); });
}

TEST_F(Rendezvous, ARankThatLeavesFailsTheOthers) {
  auto met = meet(3);
  met.pop_back();
  const auto begin = std::chrono::steady_clock::now();
  const auto thrown = test::run_ranks(met, [](Communicator& ranks) { ranks.barrier(); });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  for (size_t rank = 0; rank < met.size(); ++rank) {
    ASSERT_TRUE(thrown[rank]);
    expect_error(ErrorCode::device_failure, "rank 2 has left",
                 [&] { std::rethrow_exception(thrown[rank]); });
    expect_error(ErrorCode::device_failure, "rank 2 has left", [&] { met[rank]->check(); });
  }
}

TEST_F(Rendezvous, ARankThatHangsFailsTheOthersInTime) {
  const auto met = meet(3, milliseconds(300));
  const auto begin = std::chrono::steady_clock::now();
  const auto thrown = test::run_ranks(met, [](Communicator& ranks) {
    if (ranks.rank() == 1) return;
    ranks.barrier();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
  for (const size_t rank : {0, 2}) {
    ASSERT_TRUE(thrown[rank]);
    expect_error(ErrorCode::device_failure, "did not come in time",
                 [&] { std::rethrow_exception(thrown[rank]); });
  }
}

TEST_F(Rendezvous, AnAbortTellsAllRanksTheReason) {
  const auto met = meet(3);
  met[1]->abort("memory is full");
  for (const int rank : {0, 2, 1}) {
    expect_error(ErrorCode::device_failure, "memory is full",
                 [&] { met[static_cast<size_t>(rank)]->barrier(); });
  }
}

TEST_F(Rendezvous, CheckNoticesFailuresWithoutACall) {
  auto met = meet(2);
  met[0]->check();
  met[1]->abort("memory is full");
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  expect_error(ErrorCode::device_failure, "memory is full", [&] {
    while (std::chrono::steady_clock::now() < end) met[0]->check();
  });
}

TEST_F(Rendezvous, OtherCallsAreADisagreement) {
  const auto met = meet(2);
  const auto thrown = test::run_ranks(met, [](Communicator& ranks) {
    int32_t value = 0;
    if (ranks.rank() == 0) return ranks.barrier();
    ranks.all_reduce(&value, &value, 1, DType::i32, ReduceOp::sum);
  });
  for (const auto& error : thrown) {
    ASSERT_TRUE(error);
    expect_error(ErrorCode::device_failure,
                 "the ranks disagree: rank 0 called barrier of 0 bytes, rank 1 called all_reduce",
                 [&] { std::rethrow_exception(error); });
  }
}

// Ranks on GPUs get NCCL's id so; here a stand-in of the library makes it.
TEST_F(Rendezvous, CarriesAnIdOfNccl) {
  const auto met = meet(2);
  const auto body = [](Communicator& ranks) {
    NcclId id;
    if (ranks.rank() == 0) id = make_nccl_id({.path = FOVEA_FAKE_NCCL});
    ranks.broadcast(id.bytes.data(), id.bytes.size(), 0);
    int32_t memory = 0;
    const auto gpus = make_nccl_communicator(id, ranks.rank(), ranks.size(), {DeviceKind::cuda, 0},
                                             {FOVEA_FAKE_NCCL, &memory});
    test::check_collectives(*gpus);
  };
  for (const auto& thrown : test::run_ranks(met, body)) {
    if (thrown) std::rethrow_exception(thrown);
  }
}

TEST(MeetByMpi, NamesWhatIsMissing) {
  expect_error(ErrorCode::unsupported, {"plug-in for MPI cannot be loaded", "/nowhere.so"},
               [] { (void)meet_by_mpi("/nowhere.so"); });
  expect_error(ErrorCode::unsupported, "libm.so.6 has no fovea_join_mpi_1",
               [] { (void)meet_by_mpi("libm.so.6"); });
}

}  // namespace
}  // namespace fovea
