// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>

namespace fovea {

// A folder with links to the checkpoint testdata/models/llama and to a template of testdata/chat.
// The destructor removes the folder.
class ChatModel {
 public:
  // `chat` is the name of the template, such as "qwen2_5".
  explicit ChatModel(const std::string& chat) {
    namespace fs = std::filesystem;
    static int count = 0;
    const fs::path testdata = fs::path(FOVEA_SOURCE_DIR) / "testdata";
    folder_ = fs::temp_directory_path() /
              ("fovea_chat_" + std::to_string(getpid()) + "_" + std::to_string(count++));
    fs::create_directory(folder_);
    for (const fs::directory_entry& entry : fs::directory_iterator(testdata / "models/llama"))
      fs::create_symlink(entry.path(), folder_ / entry.path().filename());
    fs::create_symlink(testdata / "chat" / (chat + ".jinja"), folder_ / "chat_template.jinja");
  }
  ~ChatModel() { std::filesystem::remove_all(folder_); }
  ChatModel(const ChatModel&) = delete;
  ChatModel& operator=(const ChatModel&) = delete;

  std::string folder() const { return folder_.string(); }

 private:
  std::filesystem::path folder_;
};

}  // namespace fovea
