"""What the compiler made of the kernels (ORDER.md A5)."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tbik import _C

# A chain kernel is named chain_<something>; nothing else may round once where the order rounds twice.
ALLOWED = re.compile(r"\bchain_\w+[<(]")
FUSED = re.compile(r"\s(vfn?m(?:add|sub|addsub|subadd)\w*|vdpbf16ps|fn?madd|fn?msub|fmla|fmls)\s")
SYMBOL = re.compile(r"^[0-9a-f]+ <(.*)>:$")


def test_verify_no_fused_multiply_add() -> None:
    """Fused multiply-adds stand in the leaf chains and nowhere else in the built module."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("objdump (binutils) is not installed")
    text = subprocess.run(
        [objdump, "-d", "-C", "--no-show-raw-insn", _C.__file__], check=True, capture_output=True, text=True
    ).stdout
    symbol, fused = "", {}
    for line in text.splitlines():
        if match := SYMBOL.match(line):
            symbol = match[1]
        elif match := FUSED.search(line):
            fused.setdefault(symbol, set()).add(match[1])
    elsewhere = {name: sorted(found) for name, found in fused.items() if not ALLOWED.search(name)}
    assert not elsewhere
    if "avx2" in _C.cpu_paths():  # the search itself works: an x86-64 build has these kernels, whichever CPU runs it
        assert any("avx2" in name and "chain_f32" in name for name in fused)
        assert any("attention_256" in name and "chain_tile" in name for name in fused)
        assert any("attention_512" in name and "chain_tile" in name for name in fused)
        assert any("vdpbf16ps" in found for found in fused.values())
