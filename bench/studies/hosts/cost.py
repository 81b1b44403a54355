"""Estimates the speed of decoding on several Macs by a formula, not a measurement: `python -m
cortexmlx.bench.studies.hosts.cost [--rows N]`.

No Mac computed any of these figures. They say which sizes of models and which cables are worth a try.

**Tensor parallel.** A token takes the time to read a part of the weights, a fixed time in each layer, and a number of
collectives: two in each layer and one for the choice of the token (`count_collectives`; a test counts them in a run). A
collective takes the exchange, and the way from the GPU to the CPU and back, since MLX's collectives run on the CPU.

**Pipeline.** A token passes all parts in order, so one answer takes as long as on one Mac, and the handing over. It is
for models that do not fit one Mac.

What is assumed, and where it is from:

- Memory bandwidth: Apple's specifications. Decoding reaches `REACHED` of it: an assumption.
- `LAYER_SECONDS`: an assumption, so that the model gives about 14 tokens a second for 70B in 4 bits on an M3 Ultra.
- A ring of N passes a small sum on 2 (N - 1) times, one after the other. Thunderbolt: there and back in 0.38 ms at
  best (exo-explore/exo#2295, four M3 Ultra; up to 0.95 ms under load). Ethernet: about 0.3 ms there and back (press,
  J. Geerling, December 2025). Wi-Fi: 7.5 ms on average at best (exo#2295).
- JACCL on a full mesh exchanges once, whatever N is: 25.5 microseconds for 4 KB, 8 GB/s
  (omar-karray/mlx-jaccl-cluster, two M4 Pro). The press says 3 to 50. More than 5 hosts are no full mesh: a Mac Studio
  has 5 or 6 Thunderbolt ports; JACCL's ring is not modelled.
- From the GPU to the CPU and back: 180 microseconds; 4 with `MLX_METAL_FAST_SYNCH=1` (mlx#4438, M3 Ultra), which can
  hang the GPU (mlx#3142, mlx#3830).

How far off is it? Four M3 Ultra by RDMA gave 31.9 tokens a second of Qwen3 235B, and 32.5 of DeepSeek V3.1 671B (exo;
J. Geerling, December 2025). With fast synchronization the model says 58 of each in 4 bits, and 45 and 39 in 8 bits:
small experts do not reach the bandwidth, so its figures for mixtures of experts are limits. Apple shows "nearly three
times" with four M3 Ultra for a dense model of 27B (WWDC 2026, session 233). The model says 1.9 times in 4 bits, and 2.8
in 16 bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REACHED = 0.75
"""The share of the memory bandwidth that decoding reaches."""

LAYER_SECONDS = 60e-6
"""The time of a layer that does not depend on its size."""

BITS = 4.5
"""Bits of a weight: 4, and a scale and a bias of 16 bits for each 64 weights."""

CROSSING_SECONDS = {"as MLX is": 180e-6, "MLX_METAL_FAST_SYNCH=1": 4e-6}
"""From the GPU to the CPU and back, per collective."""

HOSTS = (2, 3, 4, 8)
MESH = 5
"""The most hosts that are a full mesh."""


def count_collectives(layers: int) -> int:
    """Return the number of collectives per token with tensor parallelism."""
    return 2 * layers + 1


@dataclass(frozen=True)
class Chip:
    """A Mac's chip, and its memory bandwidth in bytes per second."""

    name: str
    bandwidth: float


@dataclass(frozen=True)
class NetworkLink:
    """A network link between the hosts: its latency and bandwidth."""

    name: str
    seconds: float
    """One hop of a ring, or the whole exchange of a mesh, for a small message."""
    bandwidth: float
    """Bytes per second."""
    ring: bool

    def all_reduce_seconds(self, hosts: int, size: int) -> float:
        """Return the seconds to sum `size` bytes over `hosts` hosts."""
        if self.ring:
            return 2 * (hosts - 1) * (self.seconds + size / hosts / self.bandwidth)
        return self.seconds + (hosts - 1) * size / self.bandwidth


@dataclass(frozen=True)
class ModelSize:
    """The size of a language model: layers, hidden size, and numbers of parameters."""

    name: str
    layers: int
    hidden: int
    read: float
    """Parameters of the layers that a token reads: of experts, the active ones."""
    head: float
    """Parameters of the output projection, which each host has as a whole."""
    total: float

    @property
    def gigabytes(self) -> float:
        """The size of the weights in 10^9 bytes."""
        return self.total * BITS / 8 / 1e9


CHIPS = (Chip("M4 Pro", 273e9), Chip("M4 Max", 546e9), Chip("M3 Ultra", 819e9))

LINKS = (
    NetworkLink("TCP, Wi-Fi", 3.75e-3, 0.1e9, ring=True),
    NetworkLink("TCP, 10 Gb Ethernet", 150e-6, 1.25e9, ring=True),
    NetworkLink("TCP, Thunderbolt", 190e-6, 2.5e9, ring=True),
    NetworkLink("RDMA, Thunderbolt 5", 25.5e-6, 8e9, ring=False),
)

MODELS = (
    ModelSize("8B (Llama 3.1)", 32, 4096, 6.98e9, 0.53e9, 8.03e9),
    ModelSize("32B (Qwen3)", 64, 5120, 31.2e9, 0.78e9, 32.8e9),
    ModelSize("70B (Llama 3.3)", 80, 8192, 68.5e9, 1.05e9, 70.6e9),
    ModelSize("235B-A22B (Qwen3)", 94, 4096, 21.5e9, 0.62e9, 235e9),
    ModelSize("671B-A37B (DeepSeek V3)", 61, 7168, 36.6e9, 0.93e9, 671e9),
)


def one_host_seconds(model: ModelSize, chip: Chip) -> float:
    """Return the seconds of a token on one Mac."""
    return _read_seconds(model.read + model.head, chip) + model.layers * LAYER_SECONDS


def tensor_parallel_seconds(
    model: ModelSize, chip: Chip, link: NetworkLink, hosts: int, crossing_seconds: float, rows: int = 1
) -> float:
    """Return the seconds of a step of `rows` tokens if each host has a part of every layer."""
    collective = link.all_reduce_seconds(hosts, rows * model.hidden * 2) + crossing_seconds
    compute_seconds = _read_seconds(model.read / hosts + model.head, chip) + model.layers * LAYER_SECONDS
    return compute_seconds + count_collectives(model.layers) * collective


def pipeline_seconds(
    model: ModelSize, chip: Chip, link: NetworkLink, hosts: int, crossing_seconds: float, rows: int = 1
) -> float:
    """Return the seconds of a step of `rows` tokens if each host has some of the layers: `hosts - 1` times the hidden
    states are handed over, and then all hosts get the result of the last and the chosen token.
    """
    size = rows * model.hidden * 2
    handover_seconds = (hosts - 1) * (link.seconds + size / link.bandwidth + crossing_seconds)
    return (
        one_host_seconds(model, chip)
        + handover_seconds
        + link.all_reduce_seconds(hosts, size)
        + link.all_reduce_seconds(hosts, 4 * rows)
        + 2 * crossing_seconds
    )


def dense_model(parameters: float) -> ModelSize:
    """Return a dense model of about so many parameters: 12 layers x hidden^2, with the usual hidden = 128 x layers."""
    layers = max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
    return ModelSize(f"{parameters / 1e9:.0f}B", layers, 128 * layers, parameters, 0.0, parameters)


def break_even_size(chip: Chip, link: NetworkLink, hosts: int, crossing_seconds: float) -> float | None:
    """Return the parameters of a dense model from which on `hosts` Macs are faster than one; None above 10^13."""
    sizes = [1e8 * 1.02**step for step in range(582)]
    models = [dense_model(size) for size in sizes]
    slower = [
        m.total
        for m in models
        if tensor_parallel_seconds(m, chip, link, hosts, crossing_seconds) >= one_host_seconds(m, chip)
    ]
    if not slower:
        return sizes[0]
    return None if slower[-1] == sizes[-1] else slower[-1]


def report(rows: int = 1) -> Iterator[str]:
    """Yield the lines of the tables, in Markdown."""
    yield "A model, not a measurement. No Mac computed any of this."
    for chip in CHIPS:
        yield f"\n{chip.name}: tokens per second of {'one answer' if rows == 1 else f'{rows} answers together'}\n"
        yield from _speed_table(chip, rows)
    yield "\nThe smallest dense model (4 bits) for which several Macs are faster than one, in 10^9 parameters\n"
    yield from _break_even_table()


def _speed_table(chip: Chip, rows: int) -> Iterator[str]:
    """Yield a table of the tokens per second of each model on a chip, by link and number of hosts."""
    yield f"| model | GB | link | GPU to CPU | 1 | {' | '.join(map(str, HOSTS))} | pipeline of 2 |"
    yield f"|---|{'---:|' * (len(HOSTS) + 5)}".replace("|---:|---:|---:|---:|", "|---:|---|---|---:|", 1)
    for model in MODELS:
        for link in LINKS[1:]:
            for name, crossing_seconds in CROSSING_SECONDS.items():
                one_host_speed = rows / one_host_seconds(model, chip)
                speeds = [
                    "" if not link.ring and hosts > MESH else f"{rows / seconds:.1f}"
                    for hosts in HOSTS
                    for seconds in [tensor_parallel_seconds(model, chip, link, hosts, crossing_seconds, rows)]
                ]
                last = rows / pipeline_seconds(model, chip, link, 2, crossing_seconds, rows)
                cells = [
                    model.name,
                    f"{model.gigabytes:.0f}",
                    link.name,
                    name,
                    f"{one_host_speed:.1f}",
                    *speeds,
                    f"{last:.1f}",
                ]
                yield f"| {' | '.join(cells)} |"


def _break_even_table() -> Iterator[str]:
    """Yield a table of the smallest model for which several Macs are faster than one."""
    yield f"| chip | link | GPU to CPU | {' | '.join(f'{hosts} Macs' for hosts in HOSTS)} |"
    yield f"|---|---|---|{'---:|' * len(HOSTS)}"
    for chip in CHIPS:
        for link in LINKS:
            for name, crossing_seconds in CROSSING_SECONDS.items():
                cells = [
                    ""
                    if not link.ring and hosts > MESH
                    else _format_billions(break_even_size(chip, link, hosts, crossing_seconds))
                    for hosts in HOSTS
                ]
                yield f"| {' | '.join([chip.name, link.name, name, *cells])} |"


def _format_billions(size: float | None) -> str:
    """Return a number of parameters in 10^9, or "never" for None."""
    return "never" if size is None else f"{size / 1e9:.1f}" if size < 1e10 else f"{size / 1e9:.0f}"


def _read_seconds(parameters: float, chip: Chip) -> float:
    """Return the seconds to read weights of so many parameters from memory."""
    return parameters * BITS / 8 / (chip.bandwidth * REACHED)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of estimated speeds."""
    parser = argparse.ArgumentParser(description="A model of decoding on several Macs, not a measurement.")
    parser.add_argument("--rows", type=int, default=1, help="answers at once")
    for line in report(max(1, parser.parse_args(arguments).rows)):
        print(line)


if __name__ == "__main__":
    main()
