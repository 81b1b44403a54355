"""Faults in what a store knows a model by: its weights, and the hashes of files that are kept."""

from __future__ import annotations

from tests.faults.planted import Fault

DISK, SETUP = "cortexmlx/disk/connector.py", "cortexmlx/disk/setup.py"
LOWER = "cortexmlx/disk/tier.py"
WEIGHTS, FILE_HASH = "cortexmlx/models/weights_hash.py", "cortexmlx/disk/hashes.py"
KEPT_HASHES = "cortexmlx/disk/hashes.py"

_WORDS = 'np.frombuffer(bytes(view) + b"0" * (-len(view) % 4), np.uint32)'
_SUMS = (
    "str([int((words * np.arange(1, 2 * words.size, 2, np.uint32)).sum()) % 2**32 for view in views "
    f"for words in [{_WORDS}]])"
)

TESTS = (
    "disk/test_kept_hashes.py",
    "disk/test_file_hash.py",
    "models/test_weights.py",
    "disk/test_fingerprint.py",
    "disk/test_setup.py",
    "kv/test_disk_tier.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault(
        "weights are summed, each word times an odd number",
        WEIGHTS,
        'hashlib.sha256(b"".join(PieceHash([BytesSource(view) for view in views]).digests())).hexdigest()',
        _SUMS,
    ),
    Fault("no file of weights is read", FILE_HASH, "digest.update(buffer[:count])", "pass"),
    Fault(
        "arrays that an app put into a model are the files'",
        WEIGHTS,
        "if held_arrays is None or current_locations != {",
        "if {} == {",
    ),
    Fault("arrays are known by their names", WEIGHTS, ', interface["strides"], interface["data"][0])', ", 0, 0)"),
    Fault("a file that was written again keeps its hash", FILE_HASH, "status.st_ctime_ns)", "status.st_mtime_ns)"),
    Fault(
        "kept hashes have no proof",
        KEPT_HASHES,
        "secrets.compare_digest(match[3], self._line_proof(name, digest))",
        "True",
    ),
    Fault("keys on disk have no model in them", LOWER, ", key=identity, digest_size=16)", ", digest_size=16)"),
    Fault(
        "weights may change while their files are hashed",
        SETUP,
        "is_unchanged = self.weights.has_held_arrays(model)",
        "is_unchanged = True",
    ),
    Fault(
        "arrays are still held if they have the same form",
        WEIGHTS,
        "bool(mx.array_equal(old_array, new_array))",
        "True",
    ),
    Fault("files that could not be hashed have a name", SETUP, "if self._files is None:", "if self._files == 0:"),
    Fault("a store is asked before the model is known", LOWER, "if self.identity is None:", "if self.identity == 0:"),
    Fault(
        "a store that was left is attached again",
        DISK,
        "if (states is None or states.max_snapshots) and not self._is_disabled:",
        "if states is None or states.max_snapshots:",
    ),
)
