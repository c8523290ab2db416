#include "report.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>

namespace levit::emu {

namespace {

std::vector<Site>& sites() {
  static std::vector<Site> all;
  return all;
}

const Dl_info& program() {
  static const Dl_info info = [] {
    Dl_info found{};
    dladdr(reinterpret_cast<void*>(&place_of), &found);
    return found;
  }();
  return info;
}

// file:line of an offset of the machine code, by binutils' addr2line
std::string look_up(Place offset) {
  char address[32], line[512];
  std::snprintf(address, sizeof address, "0x%x", offset);
  const std::string command = "addr2line -s -e '" + std::string(program().dli_fname) + "' " + address + " 2>/dev/null";
  std::string found = address;
  if (FILE* pipe = popen(command.c_str(), "r")) {
    if (std::fgets(line, sizeof line, pipe)) found = line;
    pclose(pipe);
  }
  return found.substr(0, found.find_first_of(" \n"));
}

}  // namespace

Place place_of_return(void* return_address) {
  return static_cast<Place>(static_cast<char*>(return_address) - static_cast<char*>(program().dli_fbase) - 1);
}

Place place_of(const Site& site) {
  for (size_t i = 0; i < sites().size(); ++i) {
    if (sites()[i] == site) return -1 - static_cast<Place>(i);
  }
  sites().push_back(site);
  return -static_cast<Place>(sites().size());
}

std::string Report::text() const {
  std::string all;
  for (const auto& [words, place] : parts_) {
    if (place == 0) all += words;
    if (place > 0) all += look_up(place);
    if (place < 0) all += levit::emu::text(sites()[-1 - place]);
  }
  return all;
}

}  // namespace levit::emu
