"""What tests ask of the fixture `engine`: a prompt, and answers that end soon or late."""

from __future__ import annotations

from cortexmlx import SamplingParams
from support.models.tiny import tokens_of

PROMPT = tokens_of(20, seed=1)
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
