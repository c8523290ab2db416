// The few words that the emulator's tests need.
#pragma once

#include <cstdio>
#include <fstream>
#include <string>

#include "../control.h"

inline int& failures() {
  static int count = 0;
  return count;
}

inline void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++failures();
}

// "name.cpp:12" of the line of the file that ends in "// @mark"
inline std::string place_of_mark(const std::string& path, const std::string& mark) {
  std::ifstream source(path);
  std::string text;
  for (int line = 1; std::getline(source, text); ++line) {
    if (text.ends_with("// " + mark)) return path.substr(path.rfind('/') + 1) + ":" + std::to_string(line);
  }
  return "no " + mark + " in " + path;
}

// A launch must have failed with a report that has all these words and names all these @marks of the file.
inline void expect_report(const char* file, int status, const char* name, std::initializer_list<const char*> words) {
  const std::string report = status ? levit_emu_failure() : "no error";
  std::printf("%s: %s\n", name, report.c_str());
  for (const std::string word : words) {
    const std::string wanted = word[0] == '@' ? place_of_mark(file, word) : word;
    expect(report.find(wanted) != std::string::npos, std::string(name) + ": the report lacks \"" + wanted + "\"");
  }
}
