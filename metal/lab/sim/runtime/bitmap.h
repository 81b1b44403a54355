// Sets of bytes: one bit each, and the list of words that must be cleared when a threadgroup ends.
#pragma once
#include <stdlib.h>

#include "state.h"

namespace {

struct Bits {
  uint64_t* words;
  void set(uint64_t at, uint32_t size) {
    const uint64_t word = at >> 6;
    const uint32_t shift = at & 63;
    const uint64_t mask = size >= 64 ? ~0ull : (1ull << size) - 1;
    words[word] |= mask << shift;
    if (shift + size > 64) words[word + 1] |= mask >> (64 - shift);
  }
};
struct Dirty {
  uint64_t* words;
  uint64_t count, capacity;
  void push(uint64_t w) {
    if (count == capacity) {
      capacity = capacity ? capacity * 2 : 1024;
      words = (uint64_t*)realloc(words, capacity * sizeof *words);
    }
    words[count++] = w;
  }
};

}  // namespace
