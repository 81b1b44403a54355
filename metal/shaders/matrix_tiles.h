// What the kernels of products of 8 x 8 matrices share: which numbers of a matrix a lane has, how the numbers of a head are
// shared out to the lanes that load it, and where a token's head lies.

#include <metal_simdgroup_matrix>

#include "paged_attention.h"

// For loops that would take more registers unrolled.
#ifndef ROLLED
#define ROLLED _Pragma("clang loop unroll(disable)")
#endif

#include "matrix_place.h"
// A head of DIM numbers shared out to LANES lanes: each has EACH numbers, 8 neighbours at a time as long as they last, then
// 4, 2 and 1. A chunk is 8 of a lane's numbers; the last may have fewer.
template <int DIM, int LANES>
struct Share {
  static constexpr constant int EACH = DIM / LANES;
  static constexpr constant int REST = EACH % 8;
  static constexpr constant int CHUNKS = (EACH + 7) / 8;

  // The numbers of a chunk; none of one behind the last.
  static constexpr int count(int chunk) {
    return EACH - chunk * 8 >= 8 ? 8 : EACH > chunk * 8 ? REST : 0;
  }
};

// The dimension that number n of the lane `at` (0 .. LANES - 1) stands for, of MOST neighbours at a time.
template <int DIM, int LANES, int MOST = 8>
inline int share_dimension(int n, int at) {
  constexpr int REST = Share<DIM, LANES>::REST;
  const int in_chunk = n % MOST;
  const bool whole = n + MOST - in_chunk <= Share<DIM, LANES>::EACH;
  const int neighbours = whole ? MOST : in_chunk < (REST & 4) ? 4 : in_chunk < (REST & 6) ? 2 : 1;
  return n / neighbours * neighbours * LANES + at * neighbours + n % neighbours;
}

// Pointers to one, two and four numbers in memory of either kind.
template <typename KV>
struct InDevice {
  typedef const device KV* One;
  typedef const device vec<KV, 2>* Two;
  typedef const device vec<KV, 4>* Four;
};

template <typename KV>
struct InThreadgroup {
  typedef const threadgroup KV* One;
  typedef const threadgroup vec<KV, 2>* Two;
  typedef const threadgroup vec<KV, 4>* Four;
};

// The numbers of a chunk, `count` of them; it begins at base[first].
template <int LANES, typename KV, typename Memory = InDevice<KV>>
inline void load_chunk(typename Memory::One base, uint first, int count, int at, thread KV* numbers) {
  if (count & 12) {
    const typename Memory::Four from = (typename Memory::Four)(base + (first + uint(at * (count & 12))));
    const vec<KV, 4> loaded = from[0];
    UNROLL
    for (int i = 0; i < 4; i++) {
      numbers[i] = loaded[i];
    }
    if (count & 8) {
      const vec<KV, 4> more = from[1];
      UNROLL
      for (int i = 0; i < 4; i++) {
        numbers[4 + i] = more[i];
      }
    }
  }
  if (count & 2) {
    const vec<KV, 2> loaded = *(typename Memory::Two)(base + (first + uint((count & 4) * LANES + at * 2)));
    numbers[count & 4] = loaded[0];
    numbers[(count & 4) + 1] = loaded[1];
  }
  if (count & 1) {
    numbers[count & 6] = base[first + uint((count & 6) * LANES + at)];
  }
}

template <int LANES, typename KV, typename Memory = InDevice<KV>>
inline void load_chunk(typename Memory::One chunk, int count, int at, thread KV* numbers) {
  load_chunk<LANES, KV, Memory>(chunk, 0u, count, at, numbers);
}

// The keys or the values of a row and KV head.
template <typename KV, int DIM>
struct PagedHeads {
  const device KV* arena;  // token at slot s: arena + s * DIM
  const device KV* tail;   // token in column c: tail + c * DIM
  const device int* block_table;
  int arena_tokens;
};

// The head of a token. A block is looked up for a token of the tail, too, and not used: that needs no branch.
template <int BLOCK_SIZE, typename KV, int DIM>
inline const device KV* head_of(const thread PagedHeads<KV, DIM>& heads, int token) {
  const int column = token - heads.arena_tokens;
  const uint in_arena = uint(max(min(token, heads.arena_tokens - 1), 0));
  const uint block = uint(heads.block_table[in_arena / BLOCK_SIZE]);
  const uint64_t number = (uint64_t(block) * BLOCK_SIZE + in_arena % BLOCK_SIZE) * DIM;
  return column < 0 ? heads.arena + number : heads.tail + column * DIM;
}
