// Where the tokens of a lane of the matrix kernel lie.

#include "matrix_tiles.h"

// Four or eight neighbouring tokens of a row. They begin at a multiple of their number: those in the arena are in one block.
struct Neighbours {
  int slot;    // of the first, if it is in the arena
  int column;  // of the first, counted from that of the tail's first token
  int first;   // those that the item has: 0 .. 3 or 7
  int last;
};

// The COUNT neighbours from `token` on, or where the item has none of them, the nearest of which it has one.
template <int COUNT, int BLOCK_SIZE>
inline Neighbours neighbours_of(int token, int first, int last, int arena_tokens, const device int* block_table) {
  const int begin = clamp(token, first, last - 1) & ~(COUNT - 1);
  const uint looked_up = uint(max(min(begin, arena_tokens - 1), 0));  // of the tail not used: that needs no branch
  const uint block = uint(block_table[looked_up / BLOCK_SIZE]);
  const int slot = int(block * BLOCK_SIZE + looked_up % BLOCK_SIZE);
  return Neighbours{slot, begin - arena_tokens, max(first - begin, 0), min(last - 1 - begin, COUNT - 1)};
}

// One of them, or the nearest to it that the item has: the `at`-th. It is in the arena if its column is negative.
struct Neighbour {
  int at;
  int slot;
  int column;
};

inline Neighbour neighbour(const thread Neighbours& tokens, int n) {
  const int at = clamp(n, tokens.first, tokens.last);
  return Neighbour{at, tokens.slot + at, tokens.column + at};
}

// The source whose arena begins at a slot.
template <typename KV, int DIM>
inline HeadSource<KV, DIM> from_slot(const thread HeadSource<KV, DIM>& source, int slot) {
  return HeadSource<KV, DIM>{source.arena + int64_t(uint(slot)) * DIM, source.tail};
}

// What belongs to a token begins at base[first].
template <typename KV>
struct Head {
  const device KV* base;
  uint first;
};

// `near` begins at the slot of the first neighbour.
template <typename KV, int DIM>
inline Head<KV> head_of(const thread HeadSource<KV, DIM>& near, Neighbour token) {
  const bool in_arena = token.column < 0;
  return Head<KV>{in_arena ? near.arena : near.tail, uint(in_arena ? token.at : token.column) * DIM};
}
