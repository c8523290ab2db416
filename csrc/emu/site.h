// Where in the kernel something was called: default arguments take the caller's file and line.
#pragma once

#include <cstring>
#include <string>

#define LEVIT_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace levit::emu {

struct Site {
  const char* file;
  int line;

  bool operator==(const Site& other) const {
    return line == other.line && (file == other.file || !std::strcmp(file, other.file));
  }
};

// name.cuh:123, whatever folder the build named
inline std::string text(const Site& site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

}  // namespace levit::emu
