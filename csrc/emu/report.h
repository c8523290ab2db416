// What went wrong, with places of the program that are looked up only when somebody reads it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "memory.h"
#include "site.h"

namespace levit::emu {

// Of the instruction before the return address of a call.
Place place_of_return(void* return_address);
Place place_of(const Site& site);

class Report {
 public:
  void add(std::string words) { parts_.emplace_back(std::move(words), 0); }
  void add(Place place) { parts_.emplace_back("", place); }
  std::string text() const;

 private:
  std::vector<std::pair<std::string, Place>> parts_;
};

}  // namespace levit::emu
