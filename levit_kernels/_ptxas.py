"""Reads what ptxas -v and nvdisasm print about the kernels of a cubin."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """What one kernel takes on one target: bytes per thread of stack and of registers spilled, and bytes per block of
    shared memory whose size is fixed. Without nvdisasm `instructions` is None.
    """

    name: str
    target: str
    registers: int
    stack: int
    spilled: int  # stored and loaded
    shared: int
    barriers: int
    instructions: Counter | None

    @property
    def failure(self) -> str | None:
        """What the gate objects to, or None."""
        counts = self.instructions or Counter()
        local = {"LDL": counts["LDL"], "STL": counts["STL"]}
        found = [f"{self.stack} bytes of stack"] if self.stack else []
        found += [f"{self.spilled} bytes of registers spilled"] if self.spilled else []
        found += [f"{count} {opcode}" for opcode, count in local.items() if count]
        return ", ".join(found) or None


def read(printed: str, assembly: str | None, target: str) -> Iterator[Kernel]:
    """The kernels that ptxas -v printed about, by their symbols; `assembly` is what nvdisasm made of the cubin.

    Functions that were not inlined count with the kernel behind which they are printed. Raises ValueError if a figure
    is not there.
    """
    instructions = None if assembly is None else _instructions(assembly)
    for part in re.split(r"Compiling entry function ", printed)[1:]:
        symbol = re.match(r"'([\w$.]+)'", part).group(1)
        properties = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers\b.*", part)
        if used is None or not properties or (instructions is not None and symbol not in instructions):
            raise ValueError(f"cannot read what the compiler says about {symbol}:\n{part}")
        yield Kernel(
            symbol,
            target,
            int(used.group(1)),
            max(int(stack) for stack, _, _ in properties),
            sum(int(stores) + int(loads) for _, stores, loads in properties),
            _figure(r"(\d+) bytes smem", used.group()),
            _figure(r"used (\d+) barriers", used.group()),
            None if instructions is None else instructions[symbol],
        )


def _figure(pattern: str, text: str) -> int:
    """0 where it is not mentioned."""
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _instructions(assembly: str) -> dict[str, Counter]:
    found: dict[str, Counter] = {}
    for part in re.split(r"^\s*\.section\s+\.text\.", assembly, flags=re.M)[1:]:
        opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", part, re.M)
        found[re.match(r"[\w$.]+", part).group()] = Counter(opcodes)
    return found
