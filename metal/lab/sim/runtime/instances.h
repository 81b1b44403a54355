// Which lanes meet: those that wait at the same dynamic instance of an operation, which is the same call in the text, reached by the
// same calls, in the same iterations of the loops around it. Of several instances the one that comes first in the program goes first:
// its lanes may still come to the others.
#pragma once
#include <string.h>

#include "state.h"

namespace {

constexpr uint64_t kForeignPlace = 1ull << 63;

// Below 0 if `a` waits earlier in the program than `b`, 0 if both wait at one instance.
int program_order(const Fiber& a, const Fiber& b) {
  const SimThread &s = a.thread, &t = b.thread;
  const uint32_t both = s.path_length < t.path_length ? s.path_length : t.path_length;
  for (uint32_t i = 0; i < both; ++i)
    if (s.path[i] != t.path[i]) return s.path[i] < t.path[i] ? -1 : 1;
  const uint64_t x = s.path_length > both ? s.path[both] : a.place, y = t.path_length > both ? t.path[both] : b.place;
  if (x != y && !((x | y) & kForeignPlace)) return x < y ? -1 : 1;
  // Not told apart by the kernel's own text (a macro, a function of a header): by where the code is.
  if (a.site != b.site) return a.site < b.site ? -1 : 1;
  if (a.depth != b.depth) return a.depth > b.depth ? -1 : 1;
  if (s.path_length != t.path_length) return s.path_length > t.path_length ? -1 : 1;
  return x == y ? 0 : x < y ? -1 : 1;
}

bool same_instance(const Fiber& a, const Fiber& b) {
  const uint32_t steps = a.thread.path_length;
  if (a.site != b.site || a.place != b.place || a.depth != b.depth || steps != b.thread.path_length) return false;
  for (uint32_t i = 0; i < steps; ++i) if (a.thread.path[i] != b.thread.path[i]) return false;
  return true;
}

// The lanes of `waiting` that wait at the instance which comes first in the program.
uint32_t first_instance(const Simdgroup& g, uint32_t waiting) {
  if (!g.mixed) return waiting;
  const Fiber* lanes = &S.fibers[g.first];
  uint32_t first = __builtin_ctz(waiting), mask = 0;
  for (uint32_t m = waiting & (waiting - 1); m; m &= m - 1)
    if (program_order(lanes[__builtin_ctz(m)], lanes[first]) < 0) first = __builtin_ctz(m);
  for (uint32_t m = waiting; m; m &= m - 1)
    if (same_instance(lanes[__builtin_ctz(m)], lanes[first])) mask |= 1u << __builtin_ctz(m);
  return mask;
}

// With every lane its quad: 4 bits each.
uint32_t whole_quads(uint32_t mask) {
  const uint32_t any = (mask | mask >> 1 | mask >> 2 | mask >> 3) & 0x11111111u;
  return any * 15u;
}

bool depends_on_who_is_there(uint32_t op) {
  return op == SIM_OP_REDUCE || op == SIM_OP_PREFIX || op == SIM_OP_VOTE || op == SIM_OP_BROADCAST_FIRST;
}

// An operation of the lanes in `mask` while those in `missing`, which have not returned, are elsewhere in the program. Those that have left
// it out and come to the end are away for good, like lanes that return before: kernels end with a sum of the first lanes.
void report_divergence(const Simdgroup& g, uint32_t mask, uint32_t missing) {
  const Fiber& f = S.fibers[g.first + __builtin_ctz(mask)];
  if (f.scope == SIM_SCOPE_QUAD) missing &= whole_quads(mask);
  if (!missing) return;
  const uint32_t kind = depends_on_who_is_there(f.op) && (missing & ~g.ended) ? SIM_FAULT_DIVERGENT : SIM_NOTE_DIVERGENT;
  if (kind == SIM_NOTE_DIVERGENT && S.launch->finding_count >= kMaxFindings / 2) return;  // faults need the room
  Fiber* running = S.current;
  S.current = &S.fibers[g.first + __builtin_ctz(mask)];
  Finding* found = add_finding(kind, f.site, kNone, kNone, (int64_t)((uint64_t)missing << 32 | mask), f.op, false);
  S.current = running;
  if (found) found->line = (uint32_t)(f.place & kForeignPlace ? 0 : f.place >> 16);
}

// Every operation but simd_shuffle wants one lane, mask or delta; says whether it is one.
bool check_uniform(const Simdgroup& g, uint32_t mask) {
  const Fiber* lanes = &S.fibers[g.first];
  const uint32_t leader = __builtin_ctz(mask);
  uint32_t other = leader;
  for (uint32_t m = mask; m && other == leader; m &= m - 1) {
    const uint32_t lane = __builtin_ctz(m);
    const uint32_t compared = lanes[lane].scope == SIM_SCOPE_QUAD ? __builtin_ctz(mask & whole_quads(1u << lane)) : leader;
    if (lanes[lane].argument != lanes[compared].argument) other = lane;
  }
  if (other == leader) return true;
  if (lanes[leader].op == SIM_OP_SHUFFLE_INDEXED) return false;
  Fiber* running = S.current;
  S.current = &S.fibers[g.first + other];
  Finding* found = add_finding(SIM_FAULT_NOT_UNIFORM, lanes[other].site, kNone, kNone, lanes[other].argument, lanes[leader].op, false);
  S.current = running;
  if (found) {
    found->line = (uint32_t)(lanes[other].place & kForeignPlace ? 0 : lanes[other].place >> 16);
    memcpy(found->other_group, S.group, sizeof found->other_group);
    memcpy(found->other_thread, lanes[leader].thread.position_in_threadgroup, sizeof found->other_thread);
    found->other_state = lanes[leader].argument;
  }
  return false;
}

}  // namespace
