// Runs the threads of one threadgroup after another as fibers. A simdgroup's lanes meet at every simdgroup
// operation; all of a threadgroup meets at a barrier. The order of everything else is random, from a seed.
#include <string.h>

#include "instances.h"
#include "state.h"

State S;

static void* buffer_pointers[kMaxBuffers];

static inline Simdgroup* simd_of(Fiber* f) { return &S.simds[f->thread.simdgroup]; }

static Fiber* next_ready(Simdgroup* g) {
  if (!g->ready) return nullptr;
  const uint8_t* order = S.permutations[g->permutation];
  for (;;) {
    const uint32_t lane = order[g->at];
    if ((g->ready >> lane) & 1) return &S.fibers[g->first + lane];
    g->at = (g->at + 1) % SIM_LANES;
  }
}

static void release(Simdgroup* g, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) S.fibers[g->first + __builtin_ctz(m)].state = kReady;
  g->ready |= mask;
  g->at_exchange &= ~mask;
  g->at_barrier &= ~mask;
  g->mixed = (g->at_exchange | g->at_barrier) != 0;
  g->permutation = (uint32_t)(next_random() % kPermutations);
  g->at = 0;
}

static void report_barrier(Fiber* waits, Fiber* elsewhere, const char* text) {
  Fiber* running = S.current;
  S.current = waits;
  Finding* f = add_finding(SIM_FAULT_BARRIER_DIVERGENCE, waits->site, kNone, kNone, 0, 0, false);
  S.current = running;
  if (f) {
    memcpy(f->other_group, S.group, sizeof f->other_group);
    memcpy(f->other_thread, elsewhere->thread.position_in_threadgroup, sizeof f->other_thread);
    f->other_state = elsewhere->state == kDone;
    strncpy(f->text, text, sizeof f->text - 1);
  }
}

static void exchange(Simdgroup* g, uint32_t mask, uint32_t all) {
  SimExchange& e = g->exchange[g->parity];
  // Lanes that are not in the mask keep their operands for later in the same slots: they arrive again below.
  e.active = mask;
  e.done = 0;
  check_uniform(*g, mask);
  if (mask != all) {
    S.launch->divergent_ops++;
    report_divergence(*g, mask, all & ~mask & ~g->returned);
  }
  g->parity ^= 1;
  SimExchange& next = g->exchange[g->parity];
  for (uint32_t m = g->at_exchange & ~mask; m; m &= m - 1) {
    const uint32_t lane = __builtin_ctz(m);
    memcpy(next.slots[lane], e.slots[lane], SIM_SLOT);
  }
}

static void simdgroup_barrier(Simdgroup* g, uint32_t mask, uint32_t all) {
  Fiber* f = &S.fibers[g->first + __builtin_ctz(mask)];
  if (mask != all) report_barrier(f, &S.fibers[g->first + __builtin_ctz(all & ~mask)], "simdgroup_barrier");
  if (f->flags & 1) g->epoch_device++;
  if (f->flags & 2) g->epoch_threadgroup++;
}

// Called when no lane of the simdgroup can run. True if that let some of them go on.
static bool resolve(Simdgroup* g) {
  const uint32_t waiting = g->at_exchange | g->at_barrier;
  const uint32_t all = g->count == 32 ? ~0u : (1u << g->count) - 1;
  if (S.launch->coalescing) coalescing_flush(g);
  if (!waiting) return false;
  const uint32_t mask = first_instance(*g, waiting);
  (g->at_exchange & mask ? exchange : simdgroup_barrier)(g, mask, all);
  release(g, mask);
  return true;
}

static void run(Fiber* f) {
  Fiber* from = S.current;
  if (from == f) return;
  S.current = f;
  S.simd = simd_of(f);
  sim_fiber_switch(from ? &from->sp : &S.main_sp, f->sp);
}

static void back_to_main() {
  Fiber* from = S.current;
  S.current = nullptr;
  sim_fiber_switch(&from->sp, S.main_sp);
}

[[noreturn]] void abandon_launch() {
  S.abort = true;
  S.launch->aborted = 1;
  back_to_main();
  __builtin_unreachable();
}

// The current fiber cannot go on: let another lane of its simdgroup, or another simdgroup.
static void wait_as(FiberState state) {
  if (S.overdue && state != kDone) give_up_waiting(S.current->site);
  memory_settle();
  Fiber* self = S.current;
  Simdgroup* g = S.simd;
  const uint32_t bit = 1u << self->thread.lane;
  self->state = state;
  g->ready &= ~bit;
  if (state == kDone) (self->thread.at_end ? g->ended : g->returned) |= bit;
  if (state == kAtExchange || state == kAtSimdBarrier) {
    if (!(g->at_exchange | g->at_barrier)) g->waits_first = self;
    else if (!g->mixed && !same_instance(*g->waits_first, *self)) g->mixed = true;
    (state == kAtExchange ? g->at_exchange : g->at_barrier) |= bit;
  }
  Fiber* next = next_ready(g);
  if (!next && resolve(g) && (next_random() & 7)) next = next_ready(g);
  if (next) run(next);
  else back_to_main();
}

static void fiber_main() {
  sim_kernel_entry(buffer_pointers);
  S.threads_ended = S.threads_ended + 1;
  wait_as(kDone);
  __builtin_unreachable();
}

extern "C" const SimThread* sim_thread() { return &S.current->thread; }

static void note_site(uintptr_t site, uintptr_t frame, uint64_t place) {
  S.current->site = site;
  S.current->place = place;
  S.current->depth = S.current->stack_high - frame;
}

extern "C" const SimExchange* sim_exchange(const void* value, unsigned size, unsigned op, unsigned scope,
                                           unsigned argument, unsigned long place) {
  Fiber* f = S.current;
  Simdgroup* g = S.simd;
  note_site((uintptr_t)__builtin_return_address(0), (uintptr_t)__builtin_frame_address(0), place);
  f->op = op;
  f->scope = scope;
  f->argument = argument;
  memcpy(g->exchange[g->parity].slots[f->thread.lane], value, size);
  wait_as(kAtExchange);
  return &g->exchange[g->parity ^ 1];
}

extern "C" void sim_simdgroup_barrier(unsigned flags, unsigned long place) {
  note_site((uintptr_t)__builtin_return_address(0), (uintptr_t)__builtin_frame_address(0), place);
  S.current->flags = flags;
  wait_as(kAtSimdBarrier);
}

extern "C" void sim_barrier(unsigned flags, unsigned long place) {
  note_site((uintptr_t)__builtin_return_address(0), (uintptr_t)__builtin_frame_address(0), place);
  S.current->flags = flags;
  wait_as(kAtBarrier);
}

static bool threadgroup_barrier_or_end() {
  Fiber *waits = nullptr, *elsewhere = nullptr;
  for (uint32_t i = 0; i < S.thread_count && !waits; ++i)
    if (S.fibers[i].state == kAtBarrier) waits = &S.fibers[i];
  if (!waits) return false;
  for (uint32_t i = 0; i < S.thread_count && !elsewhere; ++i) {
    Fiber& f = S.fibers[i];
    if (f.state != kAtBarrier || !same_instance(f, *waits)) elsewhere = &f;
  }
  if (elsewhere) {
    report_barrier(waits, elsewhere, "threadgroup_barrier");
    S.abort = true;
    S.launch->aborted = 1;
    return false;
  }
  if (waits->flags & 1) S.epoch_device++;
  if (waits->flags & 2) S.epoch_threadgroup++;
  S.launch->barriers++;
  for (uint32_t s = 0; s < S.simd_count; ++s) {
    Simdgroup* g = &S.simds[s];
    release(g, g->count == 32 ? ~0u : (1u << g->count) - 1);
  }
  return true;
}

static void prepare_group(const uint32_t* group, const uint32_t* groups) {
  Launch& l = *S.launch;
  uint32_t size[3];
  for (int i = 0; i < 3; ++i) {
    const uint32_t left = l.grid[i] - group[i] * l.threadgroup[i];
    size[i] = left < l.threadgroup[i] ? left : l.threadgroup[i];
  }
  S.thread_count = size[0] * size[1] * size[2];
  S.simd_count = (S.thread_count + SIM_LANES - 1) / SIM_LANES;
  const uint32_t launched = l.threadgroup[0] * l.threadgroup[1] * l.threadgroup[2];
  for (uint32_t i = 0; i < S.thread_count; ++i) {
    Fiber& f = S.fibers[i];
    SimThread& t = f.thread;
    const uint32_t local[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int k = 0; k < 3; ++k) {
      t.position_in_threadgroup[k] = local[k];
      t.position_in_grid[k] = group[k] * l.threadgroup[k] + local[k];
      t.group_position_in_grid[k] = group[k];
      t.threads_per_grid[k] = l.grid[k];
      t.threadgroups_per_grid[k] = groups[k];
      t.threads_per_threadgroup[k] = size[k];
      t.dispatch_threads_per_threadgroup[k] = l.threadgroup[k];
    }
    t.index_in_threadgroup = i;
    t.path_length = 0;
    t.at_end = 0;
    t.lane = i % SIM_LANES;
    t.simdgroup = i / SIM_LANES;
    t.simdgroups = S.simd_count;
    t.dispatch_simdgroups = (launched + SIM_LANES - 1) / SIM_LANES;
    // Stacks start at different cache lines, or a thousand of them would fight for the same few sets.
    f.stack_low = (uintptr_t)l.stacks + (uintptr_t)i * l.stack_bytes;
    f.stack_high = f.stack_low + l.stack_bytes - (i % 61) * 192;
    f.sp = sim_fiber_prepare((char*)f.stack_high, fiber_main);
    f.state = kReady;
  }
  for (uint32_t s = 0; s < S.simd_count; ++s) {
    Simdgroup& g = S.simds[s];
    g.first = s * SIM_LANES;
    g.count = S.thread_count - g.first < SIM_LANES ? S.thread_count - g.first : SIM_LANES;
    g.ready = g.at_exchange = g.at_barrier = g.returned = g.ended = 0;
    g.parity = 0;
    g.epoch_threadgroup = g.epoch_device = 0;
    release(&g, g.count == 32 ? ~0u : (1u << g.count) - 1);
  }
  S.epoch_threadgroup = S.epoch_device = 0;
}

static void run_group() {
  while (!S.abort) {
    uint32_t pick = (uint32_t)(next_random() % S.simd_count), tried = 0;
    while (tried < S.simd_count && !S.simds[pick].ready) {
      pick = (pick + 1) % S.simd_count;
      ++tried;
    }
    if (tried == S.simd_count) {
      if (!threadgroup_barrier_or_end()) return;
      continue;
    }
    run(next_ready(&S.simds[pick]));
  }
}

static uint64_t gcd(uint64_t a, uint64_t b) { return b ? gcd(b, a % b) : a; }

static void run_all_groups(const uint32_t* groups, uint64_t first, uint64_t step, uint64_t total) {
  uint64_t at = first;
  for (uint64_t i = 0; i < total && !S.abort; ++i, at = (at + step) % total) {
    S.group[0] = (uint32_t)(at % groups[0]);
    S.group[1] = (uint32_t)(at / groups[0] % groups[1]);
    S.group[2] = (uint32_t)(at / groups[0] / groups[1]);
    S.group_linear = (uint32_t)at;
    prepare_group(S.group, groups);
    memory_begin_group();
    run_group();
    memory_end_group();
    S.launch->threadgroups++;
    S.launch->threads += S.thread_count;
  }
}

extern "C" __attribute__((visibility("default"))) void sim_launch(Launch* l) {
  S.launch = l;
  S.current = nullptr;
  S.abort = false;
  S.random = l->seed;
  for (auto& order : S.permutations) {
    for (uint32_t i = 0; i < SIM_LANES; ++i) order[i] = (uint8_t)i;
    for (uint32_t i = SIM_LANES - 1; i; --i) {
      const uint32_t j = (uint32_t)(next_random() % (i + 1));
      const uint8_t t = order[i];
      order[i] = order[j];
      order[j] = t;
    }
  }
  for (uint32_t i = 0; i < l->buffer_count; ++i) buffer_pointers[i] = l->buffers[i].base + l->buffers[i].start;
  uint32_t groups[3];
  for (int i = 0; i < 3; ++i) groups[i] = (l->grid[i] + l->threadgroup[i] - 1) / l->threadgroup[i];
  const uint64_t total = (uint64_t)groups[0] * groups[1] * groups[2];
  // All threadgroups once, in a scattered order: a step that shares no factor with their number.
  uint64_t step = total > 2 ? next_random() % total | 1 : 1;
  while (gcd(step, total) != 1) ++step;
  S.first_group = next_random() % total;
  S.group_step = step;
  S.group_total = total;
  memory_begin_launch();
  crash_guard_begin();
  watchdog_begin();
  if (sigsetjmp(*crash_landing(), 1) == 0) {
    run_all_groups(groups, S.first_group, step, total);
  } else {
    S.current = nullptr;
    l->aborted = 1;
  }
  watchdog_end();
  crash_guard_end();
  memory_end_launch();
}

extern "C" void sim_inactive_lane(unsigned lane) {
  Finding* f = add_finding(SIM_FAULT_INACTIVE_LANE, S.current->site, kNone, kNone, lane, 0, false);
  if (f) f->other_state = lane;
}
