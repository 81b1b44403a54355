"""Legality checks for Metal text: what a Mac's compiler would refuse, found without a Mac.

>>> from cortexmlx.metal.lab import legal
>>> legal.complaints("[[kernel]] void k(device float* x [[buffer(0)]]) { double d = 1; }")
[Complaint(line=1, message='Metal has no double')]
"""

from cortexmlx.metal.lab.legal.diagnostics import Language
from cortexmlx.metal.lab.legal.frontend import Complaint, available
from cortexmlx.metal.lab.legal.rules import complaints

__all__ = ["Complaint", "Language", "available", "complaints"]
