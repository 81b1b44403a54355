// Where in its execution a thread is: what tells one operation among lanes from another. Places in the text order them; paths.py adds
// to the text what follows loops and calls. All of it is kept in the thread's SimThread, which the access hooks do not see.
#pragma once
#include "sim/abi.h"
#include "sim/types.h"

namespace metal {
// A place in the text: line and column. Outside the kernel's own text (the highest bit) it says nothing about the order.
struct __site {
  ulong key;
  SIM_FN static constexpr __site here(uint line = __builtin_LINE(), uint column = __builtin_COLUMN(), const char* file = __builtin_FILE()) {
    return {ulong(line) << 16 | column | (__in_kernel(file) ? 0 : 1ul << 63)};
  }
 private:
  SIM_FN static constexpr bool __in_kernel(const char* file) {
    const char* name = "kernel";
    while (*name && *name == *file) ++name, ++file;
    return *name == *file;
  }
};

// One step of the path, taken back at the end of the scope, however it is left.
struct __step {
  SIM_HIDDEN SimThread* thread;
  uint at, before;
  SIM_FN __step(__site site, uint size) : thread((SIM_HIDDEN SimThread*)sim_thread()), before(thread->path_length) {
    at = before + size <= SIM_PATH ? before : SIM_PATH - size;  // deeper than any program is: the last places are used again
    thread->path[at] = site.key;
    thread->path_length = at + size;
  }
  SIM_FN ~__step() { thread->path_length = before; }
};
struct __frame : __step {
  SIM_FN explicit __frame(__site call) : __step(call, 1) {}
};
struct __loop : __step {
  SIM_FN explicit __loop(__site site = __site::here()) : __step(site, 2) { thread->path[at + 1] = 0; }
  SIM_FN bool next() { thread->path[at + 1] += 1; return true; }
};
// The last line of a kernel: whoever comes here has left the operations before it out, or is through with them.
SIM_FN void __at_end() { ((SIM_HIDDEN SimThread*)sim_thread())->at_end = 1; }
}  // namespace metal
