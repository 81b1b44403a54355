"""Faults of named pins and of the files that carry them: what is read, whose it is, and what is refused."""

from __future__ import annotations

from tests.faults.planted import Fault

PREFIX, PIN, PINNED = "cortexmlx/disk/stored_prefix.py", "cortexmlx/sessions/pin.py", "cortexmlx/kv/pinned_prefixes.py"
CONNECTOR, SETUP, ENGINE = "cortexmlx/disk/connector.py", "cortexmlx/disk/setup.py", "cortexmlx/engine.py"
TESTS = ("disk/test_stored_prefix.py", "engine/test_carried_pins.py")

FAULTS = (
    Fault(
        "proofs are not checked",
        "cortexmlx/disk/segments.py",
        "if compute_proof(secret, location.key, location.layout, (data,)) != location.proof:",
        "if False:",
    ),
    Fault("any model may import", PREFIX, "if fingerprint == self.fingerprint:", "if True:"),
    Fault("a file that lacks pieces is taken", PREFIX, "sum(present.get(key) != tokens", "sum(False"),
    Fault("a compressed file is unpacked", PREFIX, "info.compress_type != zipfile.ZIP_STORED", "False"),
    Fault("a file larger than the store is written", PREFIX, "if size > store.limit:", "if False:"),
    Fault("a segment of any size is read", PREFIX, "if info.file_size > _MAX_SEGMENT:", "if False:"),
    Fault("a manifest may name endless pieces", PREFIX, "> size - manifest.file_size:", "< 0:"),
    Fault("a piece may have endless tokens", PREFIX, "each.layout[0][1] != (block_size,)", "False"),
    Fault("tokens have any size", PREFIX, "0 <= number < 1 << 31 for", "0 <= number for"),
    Fault("a file may have no tokens", PREFIX, "not prefix.tokens or len", "len"),
    Fault("an import makes room by what it needs", PREFIX, "        store.mark_used(", "        list("),
    Fault(
        "the name is kept before the pieces",
        PREFIX,
        "        local_keys = dict(zip(carried",
        "        save_prefix(store.path, prefix)\n        local_keys = dict(zip(carried",
    ),
    Fault(
        "the file is written in its place",
        PREFIX,
        "with write_atomically(path, private=True) as file, zipfile",
        'with open(path, "wb") as file, zipfile',
    ),
    Fault("a file says whose it was", PREFIX, "_to_json(replace(prefix, client=None))", "_to_json(prefix)"),
    Fault(
        "what is imported is everybody's",
        PREFIX,
        "name=prefix.name if name is None else name, client=client)",
        "name=prefix.name if name is None else name, client=None)",
    ),
    Fault(
        "an adapter's prefix is the model's",
        PREFIX,
        "AdapterSalt(bytes.fromhex(self.adapter), client) if self.adapter else client",
        "client",
    ),
    Fault(
        "windows need no blocks",
        CONNECTOR,
        "tuple(tier.first_visible_block(group, blocks) for group in range(len(tier.groups)))",
        "tuple(blocks if group not in tier.full_attention_groups else 0 for group in range(len(tier.groups)))",
    ),
    Fault("states are not carried", CONNECTOR, "states=tier.states,", "states=False,"),
    Fault(
        "the last token is not read",
        ENGINE,
        "prompt = [*prefix.tokens, prefix.tokens[-1]]",
        "prompt = [*prefix.tokens]",
    ),
    Fault("an export does not wait for the disk", PIN, "for _ in range(_MAX_TRIES):", "for _ in range(0):"),
    Fault("what the store has lost is not written again", CONNECTOR, "entry.on_disk -= lost_groups", "pass"),
    Fault("a pin of the same name stays", PINNED, "        self.remove(self._names.get(name, -1))\n", ""),
    Fault("a lifetime never ends", PINNED, "if deadline <= now]", "if False]"),
    Fault(
        "an adapter that is not loaded is taken for none",
        PIN,
        "if prefix.adapter and prefix.adapter not in adapters:",
        "if False:",
    ),
    Fault(
        "precision is no part of what is said",
        SETUP,
        'f"{bits} bits" if bits else',
        '"" if bits else',
    ),
)
