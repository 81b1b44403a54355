// Metal's standard library, as declarations for the front end.
#pragma once
#include "legal/keywords.h"
#include "legal/scalars.h"
#include "legal/vectors.h"
#include "legal/functions.h"
#include "legal/simdgroups.h"
#include "legal/atomics.h"
#include "legal/containers.h"
#ifdef LEGAL_METAL4
#include "legal/tensors.h"
#endif
