// SPDX-License-Identifier: Apache-2.0
// How `moelora top` sees a running `bench` or `run`: each listens on a socket file of its own, PID.sock, in a folder
// that only its user can enter, and answers whoever of that user connects with one JSON document. Nothing is done while
// nobody asks, and nothing that is asked can change anything.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "samples/cli/host.h"

namespace moelora_cli {

// $XDG_RUNTIME_DIR/moelora, else /tmp/moelora-UID.
std::string live_folder();

// Answers for an engine from construction to destruction. Where the folder cannot be had it does nothing.
class LiveServer {
 public:
  LiveServer(const Engine& engine, const std::string& command, const std::string& model);
  ~LiveServer();
  LiveServer(const LiveServer&) = delete;
  LiveServer& operator=(const LiveServer&) = delete;

 private:
  void serve();
  [[nodiscard]] std::string answer() const;

  const Engine& engine_;
  std::string command_, model_, path_;
  double started_ms_;
  int listener_ = -1;
  int stop_[2] = {-1, -1};  // a pipe: written to end
  std::thread thread_;
};

// Processes of this user that listen. Files that dead ones have left are removed.
std::vector<int> live_processes();
// {"pid", "command", "model", "seconds", "metrics": moelora_metrics_text}. Throws Failure if it has gone.
nlohmann::json ask_live(int pid);

}  // namespace moelora_cli
