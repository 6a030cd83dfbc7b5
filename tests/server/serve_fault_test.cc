// SPDX-License-Identifier: Apache-2.0
// A server whose engine fails: every request gets an error without a detail of the failure, and the
// next ones are served.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <future>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "engine/small_engine.h"
#include "engine/wrapped_engine.h"
#include "server/serve.h"

namespace fovea::server {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;

// Runs serve() on a thread of this process.
class Server {
 public:
  explicit Server(std::unique_ptr<Engine> engine) {
    std::promise<uint16_t> ready;
    std::future<uint16_t> chosen = ready.get_future();
    thread_ = std::thread([engine = std::move(engine), ready = std::move(ready)]() mutable {
      ServeOptions options;
      options.port = 0;
      options.model = "m";
      options.max_running = 4;
      serve(std::move(engine), options, [&](uint16_t port) { ready.set_value(port); });
    });
    port_ = chosen.get();
  }
  ~Server() {
    kill(getpid(), SIGTERM);
    thread_.join();
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Returns the whole answer, header and body.
  std::string send(const std::string& method, const std::string& path,
                   const std::string& body = "") const {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port_);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    const std::string text = method + " " + path +
                             " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                             "Content-Length: " +
                             std::to_string(body.size()) + "\r\n\r\n" + body;
    EXPECT_EQ(::send(socket, text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
    std::string answer;
    char buffer[4096];
    for (ssize_t got = 0; (got = recv(socket, buffer, sizeof(buffer), 0)) > 0;)
      answer.append(buffer, static_cast<size_t>(got));
    close(socket);
    return answer;
  }

 private:
  std::thread thread_;
  uint16_t port_ = 0;
};

int status_of(const std::string& answer) { return std::stoi(answer.substr(9, 3)); }

const std::string kBody = R"({"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0})";
const std::string kStream =
    R"({"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "stream": true})";

struct Faults {
  std::atomic<int> next = 0;  // steps that fail from now on
  std::unique_ptr<Engine> engine() {
    return std::make_unique<WrappedEngine>(Engine::load(small_options()), [this] {
      if (next > 0) {
        --next;
        throw std::runtime_error("secret detail at 0x7f001234");
      }
    });
  }
};

TEST(ServeFault, EveryRequestGetsAnErrorAndTheServerLives) {
  Faults faults;
  const Server server(faults.engine());
  EXPECT_EQ(status_of(server.send("GET", "/health")), 200);
  const std::string good = server.send("POST", "/v1/completions", kBody);
  EXPECT_EQ(status_of(good), 200);

  faults.next = 2;
  const auto begin = std::chrono::steady_clock::now();
  const std::string failed = server.send("POST", "/v1/completions", kBody);
  EXPECT_EQ(status_of(failed), 500) << failed;
  const json error = json::parse(failed.substr(failed.find("\r\n\r\n") + 4))["error"];
  EXPECT_EQ(error["type"], "server_error");
  EXPECT_EQ(failed.find("secret"), std::string::npos) << failed;
  EXPECT_EQ(failed.find("0x"), std::string::npos) << failed;
  EXPECT_EQ(status_of(server.send("GET", "/health")), 503);

  faults.next = 2;
  const std::string stream = server.send("POST", "/v1/completions", kStream);
  EXPECT_EQ(status_of(stream), 200);
  EXPECT_NE(stream.find(R"(data: {"error":)"), std::string::npos) << stream;
  EXPECT_NE(stream.find("data: [DONE]"), std::string::npos) << stream;
  EXPECT_EQ(stream.find("secret"), std::string::npos) << stream;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);

  const auto choices = [](const std::string& answer) {
    return json::parse(answer.substr(answer.find("\r\n\r\n") + 4))["choices"];
  };
  EXPECT_EQ(choices(server.send("POST", "/v1/completions", kBody)), choices(good));
  EXPECT_EQ(status_of(server.send("GET", "/health")), 200);
  EXPECT_NE(server.send("GET", "/metrics").find("\nfovea_failed_passes_total 4\n"),
            std::string::npos);
}

// The pass is computed again, so that the client sees nothing.
TEST(ServeFault, APassThatFailsOnceChangesNoAnswer) {
  Faults faults;
  const Server server(faults.engine());
  const auto text = [&] {
    const std::string answer = server.send("POST", "/v1/completions", kBody);
    EXPECT_EQ(status_of(answer), 200) << answer;
    return json::parse(answer.substr(answer.find("\r\n\r\n") + 4))["choices"];
  };
  const json good = text();
  faults.next = 1;
  EXPECT_EQ(text(), good);
}

}  // namespace
}  // namespace fovea::server
