// SPDX-License-Identifier: Apache-2.0
// See live.h.
#include "samples/cli/live.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace moelora_cli {
namespace {

constexpr int kAnswerMs = 2000;  // for one who connects and does not read

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;
};

// False if the path does not fit.
bool fill_address(const std::string& path, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    return false;
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return true;
}

// A folder of this user that nobody else can enter; one that somebody else has made is not used.
bool is_private_folder(const std::string& path) {
  struct stat info{};
  return lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid() &&
         (info.st_mode & 077) == 0;
}

std::string socket_path(int pid) {
  return live_folder() + "/" + std::to_string(pid) + ".sock";
}

bool is_same_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && (peer.uid == geteuid() || peer.uid == 0);
}

void set_timeout(int fd) {
  const timeval limit = {kAnswerMs / 1000, 0};
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
}

std::string metrics_of(const Engine& engine) {
  std::string text;
  size_t size = 0;
  moelora_status status = MOELORA_MORE;
  while (status == MOELORA_MORE) {
    text.resize(size + size / 8);  // it may grow until the next call
    status = must(moelora_metrics_text, engine.get(), text.data(), text.size(), &size);
  }
  text.resize(size);
  return text;
}

}  // namespace

std::string live_folder() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime != nullptr && runtime[0] == '/') {
    return std::string(runtime) + "/moelora";
  }
  return "/tmp/moelora-" + std::to_string(geteuid());
}

LiveServer::LiveServer(const Engine& engine, const std::string& command, const std::string& model)
    : engine_(engine), command_(command), model_(model), path_(socket_path(getpid())), started_ms_(now_ms()) {
  const std::string folder = live_folder();
  sockaddr_un address{};
  mkdir(folder.c_str(), 0700);
  if (!is_private_folder(folder) || !fill_address(path_, address) || pipe2(stop_, O_CLOEXEC) != 0) {
    return;
  }
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  unlink(path_.c_str());  // of a dead process with this number
  if (listener_ < 0 || bind(listener_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return;
  }
  if (listen(listener_, 4) != 0) {
    return;
  }
  thread_ = std::thread([this] { serve(); });
}

LiveServer::~LiveServer() {
  if (thread_.joinable()) {
    const char byte = 0;
    if (write(stop_[1], &byte, 1) == 1) {
      thread_.join();
    } else {
      thread_.detach();
    }
    unlink(path_.c_str());
  }
  for (const int fd : {listener_, stop_[0], stop_[1]}) {
    if (fd >= 0) {
      close(fd);
    }
  }
}

void LiveServer::serve() {
  for (;;) {
    pollfd wanted[2] = {{listener_, POLLIN, 0}, {stop_[0], POLLIN, 0}};
    if (poll(wanted, 2, -1) < 0 && errno != EINTR) {
      return;
    }
    if (wanted[1].revents != 0) {
      return;
    }
    if (wanted[0].revents == 0) {
      continue;
    }
    const File peer(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    if (peer.get() < 0 || !is_same_user(peer.get())) {
      continue;
    }
    set_timeout(peer.get());
    const std::string text = answer();
    for (size_t sent = 0; sent < text.size();) {
      const ssize_t count = send(peer.get(), text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (count <= 0) {
        break;
      }
      sent += static_cast<size_t>(count);
    }
  }
}

std::string LiveServer::answer() const {
  nlohmann::json json = {
      {"pid", getpid()}, {"command", command_}, {"model", model_}, {"seconds", (now_ms() - started_ms_) / 1e3}};
  try {
    json["metrics"] = metrics_of(engine_);
  } catch (const Failure& failure) {
    json["error"] = failure.what();
  }
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::vector<int> live_processes() {
  std::vector<int> found;
  if (!is_private_folder(live_folder())) {
    return found;
  }
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(live_folder(), error)) {
    const std::string name = entry.path().filename().string();
    int pid = 0;
    const auto [end, fault] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (fault != std::errc() || std::string(end) != ".sock" || pid <= 0) {
      continue;
    }
    if (kill(pid, 0) != 0 && errno == ESRCH) {
      unlink(entry.path().c_str());
      continue;
    }
    found.push_back(pid);
  }
  std::sort(found.begin(), found.end());
  return found;
}

nlohmann::json ask_live(int pid) {
  const std::string gone = "process " + std::to_string(pid) + " is no running moelora bench or run of this user";
  sockaddr_un address{};
  const File peer(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!is_private_folder(live_folder()) || peer.get() < 0 || !fill_address(socket_path(pid), address) ||
      connect(peer.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    throw Failure(MOELORA_E_NOT_FOUND, gone);
  }
  set_timeout(peer.get());
  std::string text;
  char buffer[65536];
  for (ssize_t count = 0; (count = recv(peer.get(), buffer, sizeof(buffer), 0)) > 0;) {
    text.append(buffer, static_cast<size_t>(count));
  }
  nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded() || !json.contains("metrics")) {
    throw Failure(MOELORA_E_NOT_FOUND, gone);
  }
  return json;
}

}  // namespace moelora_cli
