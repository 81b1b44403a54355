"""Faults of the links between hosts: strangers that come in, losses that nobody notices, messages that mix."""

from __future__ import annotations

from tests.faults.planted import Fault

HANDSHAKE, LISTENER = "cortexmlx/distributed/links/handshake.py", "cortexmlx/distributed/links/listener.py"
LINK, FRAMES = "cortexmlx/distributed/links/link.py", "cortexmlx/distributed/links/link.py"
HEARTBEAT = "cortexmlx/distributed/links/link.py"
JOIN = "cortexmlx/distributed/worker.py"

TESTS = (
    *(f"distributed/links/test_{name}.py" for name in ("handshake", "visitor", "listener", "link")),
    "distributed/test_worker.py",
)
"""The tests that judge these faults."""

FAULTS = (
    Fault(
        "a proof does not depend on what was said",
        HANDSHAKE,
        "hmac.digest(key, role + transcript,",
        "hmac.digest(key, role,",
    ),
    Fault("all roles prove alike", HANDSHAKE, "hmac.digest(key, role + transcript,", "hmac.digest(key, transcript,"),
    Fault(
        "a worker's proof is not looked at",
        HANDSHAKE,
        'if not hmac.compare_digest(proof, _proof(key, b"worker", transcript)):',
        "if False:",
    ),
    Fault(
        "a controller's proof is not looked at",
        HANDSHAKE,
        'if not hmac.compare_digest((yield PROOF_BYTES), _proof(key, b"controller", transcript)):',
        "if not (yield PROOF_BYTES):",
    ),
    Fault(
        "a verdict is not signed",
        HANDSHAKE,
        'if not hmac.compare_digest(proof, _proof(key, b"verdict", transcript + verdict)):',
        "if False:",
    ),
    Fault(
        "what is missing is equal",
        HANDSHAKE,
        "if worker_identity.get(key) != controller_identity.get(key)\n    ]",
        "if worker_identity.get(key, controller_identity.get(key)) != controller_identity.get(key)]",
    ),
    Fault("workers of any epoch come in", LISTENER, "if hello.epoch != self._epoch:", "if False:"),
    Fault("a rank twice", LISTENER, "if hello.rank in self._links:", "if False:"),
    Fault("any session", LISTENER, "half is None or half.session != hello.session", "half is None"),
    Fault(
        "any address", LISTENER, "return any(address in network for network in self._allowed_networks)", "return True"
    ),
    Fault("every stranger is logged", LISTENER, "if error.kind not in self._logged_faults:", "if True:"),
    Fault("a slow stranger stays", LISTENER, "if now >= visitor.deadline]", "if False]"),
    Fault("a large message is sent", FRAMES, "if len(body) > self._max_message_bytes:", "if False:"),
    Fault("a large message is taken", FRAMES, "if length > self._max_message_bytes:", "if False:"),
    Fault("half a part is sent twice", FRAMES, "parts[0] = parts[0][sent_count:]", "parts[0] = parts[0][:]"),
    Fault("silence counts before heartbeats", HEARTBEAT, "if readable.poll(", "if not silent and readable.poll("),
    Fault("a heartbeat tells milliseconds for seconds", HEARTBEAT, "[0] / 1000)", "[0])"),
    Fault(
        "a timed-out link lives on", LINK, 'self._mark_lost(f"{self.name} {reason}", ended_there=ended_there)', "pass"
    ),
    Fault("who was given up has ended the link", LINK, "ended_there=ended_there", "ended_there=True"),
    Fault("nobody has ended the link", LINK, "ended_there=reason.endswith(ENDED)", "ended_there=False"),
    Fault("closing is a loss", LINK, "for action in [] if self._closed_here else actions:", "for action in actions:"),
    Fault("a fork ends its parent's link", LINK, "self._process:\n            for ", "-1 and False:\n            for "),
    Fault("the last messages are lost", LINK, "        self._await_last_messages()\n", ""),
    Fault("a port that meets itself", JOIN, "if connection.getsockname() == connection.getpeername():", "if False:"),
)
