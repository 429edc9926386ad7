"""Writes tests/vectors/*.json: inputs are chosen here, every expected value is computed by tests/oracle.c.

    python tests/make_vectors.py            # write the files
    python tests/make_vectors.py --check    # regenerate in memory; exit status 1 if a committed file differs

Only the standard library and a C11 compiler (CC, cc, gcc or clang) are needed. tests/vectors/README.md has the schemas.
"""

import argparse
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VECTORS = HERE / "vectors"
FORMATS = {"none": 0, "bf16": 1, "fp16": 2, "fp32": 3, "fp64": 4}
BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "fp64": 64}
FRACTION = {"bf16": 7, "fp16": 10, "fp32": 23, "fp64": 52}
EMIN = {"bf16": -126, "fp16": -14, "fp32": -126, "fp64": -1022}
CUTS, STEP, REDUCE, EPILOGUE, LINEAR, AMX = range(6)
FLOATS = ("bf16", "fp16", "fp32", "fp64")


def acc_of(dtype):
    return "fp64" if dtype == "fp64" else "fp32"


def text(bits, dtype):
    return f"0x{bits:0{BITS[dtype] // 4}x}"


def value_text(token, dtype):
    return token if token == "nan" else text(int(token, 16), dtype)


# ---- the oracle -----------------------------------------------------------------------------------------------------


def find_compiler():
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    return None


class Oracle:
    """Collects commands, runs the C program once, hands each answer (a list of words) to its callback."""

    def __init__(self, program):
        self.program = program
        self.pending = []

    def ask(self, callback, kind, dtype="none", wire="none", out="none", bias="none", sizes=(0, 0, 0, 0), values=()):
        head = (kind, FORMATS[dtype], FORMATS[wire], FORMATS[out], FORMATS[bias], *sizes)
        line = " ".join(map(str, head)) + "".join(f" {bits:x}" for bits in values)
        self.pending.append((line, callback))

    def answer(self):
        stdin = "\n".join(line for line, _ in self.pending) + "\n"
        done = subprocess.run([self.program], input=stdin, capture_output=True, text=True, check=True)
        answers = done.stdout.splitlines()
        if len(answers) != len(self.pending):
            raise RuntimeError(f"{len(self.pending)} commands, {len(answers)} answers")
        pending, self.pending = self.pending, []
        for (_, callback), line in zip(pending, answers, strict=True):
            callback(line.split())


def compile_oracle(folder):
    program = str(Path(folder) / "oracle")
    flags = ["-std=c11", "-O2", "-ffp-contract=off"]
    subprocess.run([find_compiler(), *flags, str(HERE / "oracle.c"), "-o", program, "-lm"], check=True)
    return program


# ---- inputs ---------------------------------------------------------------------------------------------------------


class Source:
    """splitmix64, so that the files do not depend on the version of a library's generator."""

    def __init__(self, seed):
        self.state = seed

    def word(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        z = self.state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    def integer(self, low, high):
        return low + self.word() % (high - low + 1)

    def choice(self, items):
        return items[self.word() % len(items)]

    def normal(self, dtype, low, high):
        """A normal number of random sign, random fraction and an exponent in low..high."""
        exponent = self.integer(low, high) - EMIN[dtype] + 1
        sign = self.integer(0, 1) << (BITS[dtype] - 1)
        return sign | exponent << FRACTION[dtype] | self.word() % 2 ** FRACTION[dtype]


def number(value, dtype):
    """The bits of a value (a float or a C99 hexadecimal string) that the format holds exactly."""
    value = float.fromhex(value) if isinstance(value, str) else float(value)
    code = {"fp64": "d", "fp32": "f", "bf16": "f", "fp16": "e"}[dtype]
    packed = struct.pack(">" + code, value)
    assert value != value or struct.unpack(">" + code, packed)[0] == value, f"{value.hex()} is no {dtype}"
    bits = int.from_bytes(packed, "big")
    assert dtype != "bf16" or bits % 65536 == 0, f"{value.hex()} is no bf16"
    return bits >> 16 if dtype == "bf16" else bits


def smallest(dtype):
    return 2.0 ** (EMIN[dtype] - FRACTION[dtype])


def largest(dtype):
    return (2.0 - 2.0 ** -FRACTION[dtype]) * 2.0 ** (2 - EMIN[dtype] - 1)


def negate(bits, dtype):
    return bits ^ 1 << (BITS[dtype] - 1)


# ---- cuts.json, trees.json ------------------------------------------------------------------------------------------

LENGTHS = (
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    12,
    13,
    16,
    17,
    24,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    80,
    96,
    97,
    100,
    127,
    128,
    192,
    251,
    256,
)
LENGTHS += (320, 384, 512, 576, 640, 768, 896, 960, 1000, 1024, 1152, 1536, 1920, 2048, 2304, 3072, 3584, 4096, 4864)
LENGTHS += (
    4999,
    5120,
    7919,
    8192,
    9216,
    11008,
    13824,
    14336,
    28672,
    32000,
    49152,
    65521,
    65536,
    128256,
    151936,
    262144,
)


def make_cuts(oracle):
    cases = []
    for leaves in [*range(1, 34), 48, 64]:
        for length in LENGTHS:

            def keep(words, leaves=leaves, length=length):
                unit, *cuts = map(int, words)
                cases.append({"L": leaves, "K": length, "q": unit, "cuts": cuts})

            oracle.ask(keep, CUTS, sizes=(leaves, 0, 0, length))
    oracle.answer()
    return {"cuts": cases}


def parse_reduction(words, dtype, world):
    """Splits an answer into the covers by ascending rank, the tree's triples and the root."""
    covers, cover = [], []
    for position, word in enumerate(words):
        if word == "/":
            covers.append(cover)
            cover = []
            if len(covers) == world:
                words = words[position + 1 :]
                break
        else:
            level, index, value = word.split(",") if "," in word else (None, None, word)
            cover.append([int(level), int(index), value_text(value, dtype)])
    *triples, root = words
    return covers[::-1], [list(map(int, triple.split(","))) for triple in triples], value_text(root, dtype)


def make_trees(oracle):
    trees, covers = [], []
    for leaves in range(1, 34):
        for world in range(1, 10):

            def keep(words, leaves=leaves, world=world):
                ranks, triples, _ = parse_reduction(words, "fp32", world)
                if world == 1:
                    trees.append({"L": leaves, "nodes": triples})
                nodes = [[[level, index] for level, index, _ in cover] for cover in ranks]
                covers.append({"L": leaves, "W": world, "ranks": nodes})

            oracle.ask(keep, REDUCE, "fp32", sizes=(world, 1, 0, leaves), values=[0] * leaves)
    oracle.answer()
    return {"trees": trees, "covers": covers}


# ---- chains.json ----------------------------------------------------------------------------------------------------


def flush_chains():
    """Directed fp32 chains at the flush boundary, as (name, [(a, b), ...])."""
    tiny = "0x1p-126"
    near = {  # the last product, added to +2^-126
        "exact, |s| = 2^-62": ("0x0p+0", 1),
        "minus 2^-252, |s| rounds to 2^-62": ("0x1p-126", "-0x1p-126"),
        "minus 2^-200, |s| rounds to 2^-62": ("0x1p-100", "-0x1p-100"),
        "minus just below 2^-151, |s| rounds to 2^-62": ("0x1.fffffep-76", "-0x1p-76"),
        "minus 2^-151, |s| ties to even 2^-62": ("0x1p-75", "-0x1p-76"),
        "minus just above 2^-151, |s| < 2^-62": ("0x1.000002p-75", "-0x1p-76"),
        "minus 2^-150, |r| ties to even 2^-126, |s| < 2^-62": ("0x1p-75", "-0x1p-75"),
        "minus 2^-150, factors exchanged": ("0x1p-30", "-0x1p-120"),
        "minus 2^-150, large second factor": ("0x1p-125", "-0x1p-25"),
        "minus just above 2^-150, |r| < 2^-126": ("0x1.000002p-75", "-0x1p-75"),
        "minus 2^-149, |r| is the largest subnormal": ("0x1p-75", "-0x1p-74"),
        "plus 2^-150, |r| ties to even 2^-126": ("0x1p-75", "0x1p-75"),
        "plus just above 2^-150, |r| > 2^-126": ("0x1.000002p-75", "0x1p-75"),
        "plus 2^-149": ("0x1p-75", "0x1p-74"),
        "minus half, result subnormal": ("0x1p-64", "-0x1p-63"),
        "minus itself, exact zero": ("0x1p-63", "-0x1p-63"),
    }
    for name, (a, b) in near.items():
        yield f"+2^-126 then {name}", [(tiny, 1), (a, b)]
        mirrored = b[1:] if str(b).startswith("-") else "-" + str(b)
        yield f"-2^-126 then mirrored: {name}", [("-" + tiny, 1), (a, mirrored)]
        yield f"+2^-126 then {name}, then + 1 (flush mid-chain)", [(tiny, 1), (a, b), (1, 1)]
        yield f"+2^-126 then {name}, then + 2^-126 (flush mid-chain shows)", [(tiny, 1), (a, b), (tiny, 1)]
    above = "0x1.000002p-126"
    yield "next above 2^-126 minus 2^-149, exact 2^-126", [(above, 1), ("0x1p-75", "-0x1p-74")]
    yield "next above 2^-126 minus just above 2^-149", [(above, 1), ("0x1.000002p-75", "-0x1p-74")]
    yield "next above 2^-126 minus 1.5 * 2^-149, tie", [(above, 1), ("0x1.8p-75", "-0x1p-74")]
    yield "next above 2^-126 minus 1.25 * 2^-149, |s| tie", [(above, 1), ("0x1.4p-75", "-0x1p-74")]
    yield "next above 2^-126 minus 1.2500001 * 2^-149", [(above, 1), ("0x1.400002p-75", "-0x1p-74")]
    products = {  # a single product that rounds to, or near, 2^-126
        "2^-126": ("0x1p-63", "0x1p-63"),
        "2^-126 (1 - 2^-24), |r| ties up, |s| < 2^-62": ("0x1.fffffep-64", "0x1p-63"),
        "2^-126 (1 - 2^-46), |s| rounds to 2^-62": ("0x1.000002p-63", "0x1.fffffcp-64"),
        "2^-126 (1 - 2^-24)^2, |s| < 2^-62": ("0x1.fffffep-64", "0x1.fffffep-64"),
        "just above 2^-126": ("0x1.000002p-63", "0x1p-63"),
        "2^-127": ("0x1p-64", "0x1p-63"),
        "2^-149, smallest subnormal": ("0x1p-75", "0x1p-74"),
        "2^-150, underflows to zero": ("0x1p-75", "0x1p-75"),
        "2^-252, underflows to zero": ("0x1p-126", "0x1p-126"),
        "2^-126 from a huge factor": ("0x1p+127", "0x1p-126"),
    }
    for name, (a, b) in products.items():
        yield f"product {name}", [(a, b)]
        yield f"negative product {name}", [(a, "-" + b)]
        yield f"product {name}, exchanged, then + 2^-126", [(b, a), (tiny, 1)]
    sub, big = "0x1.fffffcp-127", "0x1p+127"
    yield "subnormal a times a large b is zero", [(sub, big)]
    yield "large a times subnormal b is zero", [(big, sub)]
    yield "subnormal a and b", [(sub, sub)]
    yield "smallest subnormal a, then 1", [("0x1p-149", big), (1, 1)]
    yield "negative subnormal a", [("-" + sub, big), (tiny, 1)]
    yield "subnormal a times Inf is NaN (0 * Inf)", [(sub, "inf")]
    yield "Inf times subnormal b is NaN", [("inf", "-" + sub)]
    yield "smallest normal a is kept", [(tiny, big)]
    yield "c would be subnormal: 2^-127 then + 2^-127", [("0x1p-64", "0x1p-63")] * 2
    yield "subnormal c twice: 2^-140 added 5 times", [("0x1p-70", "0x1p-70")] * 5
    yield "1.5 * 2^-126 - 2^-126, then + 2^-126", [("0x1.8p-126", 1), (tiny, -1), (tiny, 1)]
    yield "1.5 * 2^-126 - 2^-126 + 2^-127 (no result survives)", [("0x1.8p-126", 1), (tiny, -1), ("0x1p-64", "0x1p-63")]
    yield "a flushed negative result and +0", [("-0x1p-64", "0x1p-63"), (0, 1)]
    yield "a flushed negative result and -0 product", [("-0x1p-64", "0x1p-63"), (0, -1)]


def bf16_flush_chains():
    """The same boundary with factors that bf16 holds; pairs matter to instructions that take two products at once."""
    tiny, minus, half = ("0x1p-63", "0x1p-63"), ("0x1p-63", "-0x1p-63"), ("0x1p-64", "0x1p-63")
    yield "2^-126 minus 2^-150: |r| ties to 2^-126, |s| < 2^-62", [tiny, ("0x1p-75", "-0x1p-75")]
    yield "2^-126 minus 2^-151: |s| ties to 2^-62", [tiny, ("0x1p-75", "-0x1p-76")]
    yield "2^-126 minus 1.0078125 * 2^-151", [tiny, ("0x1.02p-75", "-0x1p-76")]
    yield "2^-127 three times: odd length", [half] * 3
    yield "1.5 * 2^-126 - 2^-126 + 2^-126: odd length", [("0x1.8p-63", "0x1p-63"), minus, tiny]
    yield "first of a pair is flushed before the second is added", [half, half]
    yield "a pair in ascending order: 2^-126 - 2^-127 + 2^-127", [tiny, ("0x1p-64", "-0x1p-63"), half]
    yield "the pair the other way round: 2^-127 + 2^-126 - 2^-127", [half, tiny, ("0x1p-64", "-0x1p-63")]
    yield "subnormal operand times 2^127", [("0x1p-127", "0x1p+127"), (1, 1)]
    yield "2^127 times subnormal operand", [("0x1p+127", "-0x1p-133")]


def special_chains():
    """Directed chains of any format, as (name, [(a, b), ...]); max is the largest finite number of the format."""
    yield "empty leaf", []
    yield "one element", [(1.5, -2)]
    yield "two elements", [(1.5, -2), (0.25, 3)]
    yield "three elements", [(1.5, -2), (0.25, 3), (-7, 0.5)]
    yield "-0 product", [(0, -1)]
    yield "-0 times +0", [("-0x0p+0", 0)]
    yield "-0 three times", [(-1, 0), ("-0x0p+0", 1), (0, -3)]
    yield "1 - 1 is +0", [(1, 1), (1, -1)]
    yield "-1 + 1 is +0", [(1, -1), (1, 1)]
    yield "NaN in a", [(1, 1), ("nan", 1), (1, 1)]
    yield "NaN in b", [(1, "nan")]
    yield "NaN times zero", [(0, "nan")]
    yield "Inf", [(1, 1), ("inf", 2), (-5, 1)]
    yield "-Inf", [("-inf", 2), (-5, 1)]
    yield "Inf times 0 is NaN", [(1, 1), ("inf", 0)]
    yield "0 times -Inf is NaN", [(0, "-inf"), (1, 1)]
    yield "Inf - Inf is NaN", [("inf", 1), (1, "-inf")]
    yield "Inf then NaN", [("inf", 1), (1, "nan")]
    yield "a finite product beyond max does not meet -Inf as Inf", [("-inf", 1), ("max", "max")]
    yield "nor its negative +Inf", [("inf", 1), ("-max", "max")]
    yield "max + max", [("max", 1), ("max", 1)]
    yield "max * max", [("max", "max"), (1, 1)]
    yield "-max * max - Inf", [("max", "-max"), ("inf", -1)]
    yield "overflow then opposite Inf is NaN", [("max", "max"), ("max", "max"), ("inf", -1)]
    yield "the product does not overflow alone", [("max", "-1"), ("max", 2)]
    yield "smallest subnormal operands", [("sub", "sub"), ("sub", 1), (1, "sub")]
    yield "smallest subnormal times max", [("sub", "max")]
    yield "subnormals cancel", [("sub", 3), (1, "-sub"), ("sub", -2)]
    yield "one rounding per step: 1.0078125^2 - 1.015625", [("0x1.02p+0", "0x1.02p+0"), ("-0x1.04p+0", 1)]
    yield "ties to even: 2^24 + 1 + 1", [(4096, 4096), (1, 1), (1, 1)]
    yield "ties to even: 2^24 + 2 + 1", [(4096, 4096), (2, 1), (1, 1)]


def parse_special(value, dtype):
    if isinstance(value, str) and value.lstrip("-") in ("max", "sub"):
        magnitude = largest(dtype) if value.endswith("max") else smallest(dtype)
        return number(-magnitude if value.startswith("-") else magnitude, dtype)
    return number(value, dtype)


def random_chain(source, dtype):
    """Wide exponents, cancellation of earlier products, and sums that pass the subnormal range."""
    low, high = EMIN[dtype], 1 - EMIN[dtype]
    kind = source.integer(0, 4)
    if kind == 0:  # every exponent of the format (fp32: products overflow and underflow)
        ranges = [(low, high)] * 2
    elif kind == 1:  # about 60 powers of two in the products
        ranges = [(max(low, -15), min(high, 15))] * 2
    elif kind == 2:  # products round about 2^-126
        ranges = [(max(low, -75), max(low, -75) + 14)] * 2
    elif kind == 3:  # one small factor, partly subnormal below
        ranges = [(low, low + 25), (max(low, -12), 12)]
    else:
        ranges = [(-3, 3)] * 2
    pairs = []
    for _ in range(source.integer(1, 40)):
        a, b = source.normal(dtype, *ranges[0]), source.normal(dtype, *ranges[1])
        if source.integer(0, 15) == 0:
            a &= 1 << (BITS[dtype] - 1) | 2 ** FRACTION[dtype] - 1  # subnormal or zero
        pairs.append((a, b))
        if source.integer(0, 3) == 0:
            again, factor = source.choice(pairs)
            pairs.append((negate(again, dtype), factor ^ source.integer(0, 2)))
    return pairs


def boundary_step(source):
    """c just above +-2^-126 and a product that brings the sum to within some quarters of 2^-149 of it."""
    above, quarters = source.integer(0, 12), source.integer(-24, 24)
    c = number((2**23 + above) * 2.0**-149, "fp32")
    a = number((quarters - 8 * above) * 2.0**-70, "fp32")
    b = number(2.0**-82 * (1 + source.integer(0, 2) * 2.0**-23), "fp32")
    if source.integer(0, 1):
        a, c = negate(a, "fp32"), negate(c, "fp32")
    return (a, b, c) if source.integer(0, 1) else (b, a, c)


def directed_steps():
    sub, tiny = "0x1.fffffcp-127", "0x1p-126"
    yield from (
        (sub, 1, 1),
        (1, sub, 1),
        (1, 1, sub),
        (sub, 1, sub),
        (1, 0, sub),
        (1, 0, "-" + sub),
        (1, -1, "0x1p-149"),
    )
    yield from (("-" + sub, 1, 0), ("-" + sub, 1, "-0x0p+0"), (0, 1, "-" + sub), ("-0x0p+0", 1, "-" + sub))
    yield from (
        (tiny, 1, sub),
        (tiny, "0x1.fffffep-1", sub),
        (tiny, "0x1p-1", tiny),
        (tiny, "0x1p-1", 0),
        (tiny, "-0x1p-1", 0),
    )
    yield from (("inf", sub, 1), (sub, "-inf", sub), ("inf", 1, sub), (1, 1, "nan"), (1, 1, "-inf"), ("inf", 1, "-inf"))
    yield from (("0x1p+127", "0x1p-126", "-0x1p+0"), ("0x1p+127", "0x1.000002p-126", "-0x1p+1"))


def make_chains(oracle):
    chains, steps = [], []

    def add(group, name, dtype, pairs):
        acc = acc_of(dtype)
        a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        case = {"group": group, "name": name, "dtype": dtype, "a": [text(bits, dtype) for bits in a]}
        case["b"] = [text(bits, dtype) for bits in b]

        def keep(words):
            nan = text({"fp32": 0x7FC00000, "fp64": 0x7FF8000000000000}[acc], acc)
            leaf, _, gradual = ("nan" if word == nan else word for word in (value_text(word, acc) for word in words))
            chains.append({**case, "leaf": leaf, "gradual": gradual})

        oracle.ask(keep, LINEAR, dtype, out=acc, sizes=(1, 1, 1, len(pairs)), values=a + b)

    for name, pairs in flush_chains():
        add("flush", name, "fp32", [(number(a, "fp32"), number(b, "fp32")) for a, b in pairs])
    for name, pairs in bf16_flush_chains():
        add("flush", name, "bf16", [(number(a, "bf16"), number(b, "bf16")) for a, b in pairs])
    for dtype in FLOATS:
        for name, pairs in special_chains():
            add("special", name, dtype, [(parse_special(a, dtype), parse_special(b, dtype)) for a, b in pairs])
        source = Source(1000 + FORMATS[dtype])
        for length in range(68):  # every tail of a vector body of up to 32 or 64 elements
            pairs = [(source.normal(dtype, -8, 8), source.normal(dtype, -8, 8)) for _ in range(length)]
            add("length", f"length {length}", dtype, pairs)
        for index in range({"fp32": 320, "bf16": 120}.get(dtype, 60)):
            add("random", f"random {index}", dtype, random_chain(source, dtype))
    source = Source(2000)
    triples = [tuple(number(value, "fp32") for value in triple) for triple in directed_steps()]
    for a, b, c in triples + [boundary_step(source) for _ in range(400)]:

        def keep_step(words, a=a, b=b, c=c):
            words = [value_text(words[0], "fp32")]
            steps.append({"a": text(a, "fp32"), "b": text(b, "fp32"), "c": text(c, "fp32"), "r": words[0]})

        oracle.ask(keep_step, STEP, "fp32", sizes=(0, 1, 0, 3), values=[a, b, c])
    oracle.answer()
    flushed = [case for case in chains if case["leaf"] != case["gradual"]]
    assert len(flushed) >= 60 and len({case["r"] for case in steps}) > 10
    return {"chains": chains, "steps": steps}


# ---- nodes.json -----------------------------------------------------------------------------------------------------


def special_values(dtype):
    normal = 2.0 ** EMIN[dtype]
    values = [
        0.0,
        1.0,
        1 + 2.0 ** -FRACTION[dtype],
        smallest(dtype),
        3 * smallest(dtype),
        normal - smallest(dtype),
        normal,
    ]
    values += [normal + smallest(dtype), 2.0 ** (FRACTION[dtype] + 1), largest(dtype), float("inf")]
    bits = [number(value, dtype) for value in values]
    return bits + [negate(b, dtype) for b in bits] + [number("nan", dtype)]


def wire_inputs():
    """fp32 bits round about every kind of bf16 rounding."""
    for upper in (0x0000, 0x0001, 0x0002, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x3FFF, 0x4049, 0x7F7E, 0x7F7F):
        for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
            yield upper << 16 | lower
            yield 0x80000000 | upper << 16 | lower
    yield from (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFF80FFFF)


def make_nodes(oracle):
    nodes, wires, roots = [], [], []

    def add_node(acc, left, right):
        def keep(words):
            root = parse_reduction(words, acc, 1)[2]
            nodes.append({"acc": acc, "left": text(left, acc), "right": text(right, acc), "node": root})

        oracle.ask(keep, REDUCE, acc, sizes=(1, 1, 0, 2), values=[left, right])

    for acc in ("fp32", "fp64"):
        source = Source(3000 + FORMATS[acc])
        for left in special_values(acc):
            for right in special_values(acc):
                add_node(acc, left, right)
        for index in range(150):
            low = (EMIN[acc], -30, -2)[index % 3]
            left = source.normal(acc, low, (EMIN[acc] + 20, 30, 2)[index % 3])
            add_node(acc, left, source.normal(acc, low, (EMIN[acc] + 20, 30, 2)[index % 3]))

    def add_wire(bits):
        def keep(words):
            wires.append({"x": text(bits, "fp32"), "rounded": parse_reduction(words, "fp32", 1)[2]})

        oracle.ask(keep, REDUCE, "fp32", "bf16", sizes=(1, 1, 0, 1), values=[bits])

    source = Source(3100)
    for bits in [*wire_inputs(), *(source.normal("fp32", -126, 127) for _ in range(60))]:
        add_wire(bits)

    def add_root(acc, wire, world, leaves, kind):
        leaves = list(leaves)  # the caller changes its list for the next case

        def keep(words):
            covers, _, root = parse_reduction(words, acc, world)
            case = {"acc": acc, "wire": wire, "L": len(leaves), "W": world, "kind": kind}
            roots.append({**case, "leaves": [text(bits, acc) for bits in leaves], "covers": covers, "root": root})

        oracle.ask(keep, REDUCE, acc, wire, sizes=(world, 1, 0, len(leaves)), values=leaves)

    source = Source(3200)
    for leaf_count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 21, 24, 31, 32, 33):
        for acc, wire in (("fp32", "none"), ("fp32", "bf16"), ("fp64", "none")):
            for world in sorted({1, 2, 3, min(leaf_count, 4), min(leaf_count, 9)}):
                spread = source.choice((2, 12, 30))
                leaves = [source.normal(acc, -spread, spread) for _ in range(leaf_count)]
                for i in range(2, leaf_count, 3):  # cancels an earlier leaf, so that the order shows
                    leaves[i] = negate(source.choice(leaves[:i]), acc)
                add_root(acc, wire, world, leaves, "random")
        low = EMIN["fp32"]
        leaves = [source.normal("fp32", low, low + 3) & ~(source.integer(0, 1) << 30) for _ in range(leaf_count)]
        leaves = [bits & 0x80FFFFFF for bits in leaves]
        for wire in ("none", "bf16"):
            add_root("fp32", wire, min(2, leaf_count), leaves, "subnormal")
        leaves = [number("-0x0p+0", "fp32")] * leaf_count
        for wire in ("none", "bf16"):  # a plain tensor can bring -0; the wire rounding removes it
            add_root("fp32", wire, min(2, leaf_count), leaves, "negative zero")
        leaves = [source.normal("fp32", -3, 3) for _ in range(leaf_count)]
        leaves[leaf_count // 2] = number("inf", "fp32")
        add_root("fp32", "bf16", min(2, leaf_count), leaves, "inf")
        leaves[-1] = number("nan" if leaf_count < 3 else "-inf", "fp32")
        add_root("fp32", "none", min(2, leaf_count), leaves, "nan")
        leaves = [number(largest("fp32"), "fp32")] + [source.normal("fp32", 100, 127) for _ in range(leaf_count - 1)]
        add_root("fp32", "bf16", min(2, leaf_count), leaves, "overflow")
    oracle.answer()
    return {"nodes": nodes, "wires": wires, "roots": roots}


# ---- epilogues.json -------------------------------------------------------------------------------------------------


def cast_inputs(acc, out):
    """Values round about the halfway points, the subnormal range and the largest number of the output format."""
    inputs = [number(value, acc) for value in (0.0, "-0x0p+0", "inf", "-inf", "nan")]
    inputs.append(number("nan", acc) | 1 << (BITS[acc] - 1) | 5)  # negative, with a payload
    inputs.append(number("inf", acc) | 1)  # signaling
    if acc == out:
        return inputs + [b for b in special_values(acc) if b not in inputs]
    ulp, tiny, step = 2.0 ** -FRACTION[out], smallest(out), 2.0 ** -FRACTION[acc]
    halves = [(1 + ulp * (i + 0.5), 1.0) for i in (0, 1, 2)] + [(2 - ulp / 2, 1.0), (1 + ulp, 1.0)]
    halves += [(i + 0.5, tiny) for i in (0, 1, 2, 3)] + [(1.0, tiny), (2.0 ** FRACTION[out] - 0.5, tiny)]
    halves += [(2.0 ** FRACTION[out] - 0.25, tiny), (0.25, tiny), (2 - ulp / 2, 2.0 ** (1 - EMIN[out]))]
    halves += [(2 - ulp, 2.0 ** (1 - EMIN[out])), (1.0, 2.0 ** EMIN[out])]
    for value, scale in halves:
        for sign in (1, -1):
            for nudge in (1 - step, 1.0, 1 + 2 * step):
                exact = sign * value * nudge * scale
                if acc == "fp32":
                    exact = struct.unpack("f", struct.pack("f", exact))[0] if abs(exact) < 2.0**127.99999 else exact
                    if abs(exact) > largest("fp32"):
                        continue
                inputs.append(number(exact, acc))
    return list(dict.fromkeys(inputs))


def make_epilogues(oracle):
    cases = []

    def add(group, acc, root, out, world=None, bias_dtype="none", bias=None):
        case = {"group": group, "acc": acc, "root": text(root, acc), "W": world, "bias_dtype": bias_dtype}
        case["bias"] = None if bias is None else text(bias, bias_dtype)
        case["out"] = out
        values = [root] if bias is None else [root, 0, bias]  # the 0 stands where a linear has its weight

        def keep(words):
            cases.append({**case, "expected": value_text(words[0], out)})

        oracle.ask(
            keep,
            EPILOGUE,
            acc,
            out=out,
            bias=bias_dtype,
            sizes=(world or 0, 1, int(bias is not None), 1),
            values=values,
        )

    source = Source(4000)
    for acc, outs in (("fp32", ("bf16", "fp16", "fp32")), ("fp64", FLOATS)):
        for out in outs:
            for root in cast_inputs(acc, out):
                add("cast", acc, root, out)
            for _ in range(24):
                add("cast", acc, source.normal(acc, -24 if out == "fp16" else -140 if acc == "fp64" else -126, 15), out)
    # Rounded once: through fp32 these would become ties and go to even.
    for out, root in (
        ("bf16", 1 + 2.0**-8 + 2.0**-40),
        ("fp16", 1 + 2.0**-11 + 2.0**-40),
        ("bf16", 1 + 3 * 2.0**-8 - 2.0**-40),
    ):
        add("cast", "fp64", number(root, "fp64"), out)
    for world in range(1, 10):
        for acc in ("fp32", "fp64"):
            low = EMIN[acc]
            roots = [
                number(value, acc)
                for value in (1.0, "-0x0p+0", "inf", "nan", largest(acc), smallest(acc), 7 * smallest(acc))
            ]
            roots += [source.normal(acc, low, low + 2), source.normal(acc, -3, 3), source.normal(acc, -60, 60)]
            for root in roots:
                add("avg", acc, root, acc, world)
    for bias_dtype in ("bf16", "fp16", "fp32"):
        for _ in range(12):
            add(
                "bias", "fp32", source.normal("fp32", -4, 4), "fp32", None, bias_dtype, source.normal(bias_dtype, -4, 4)
            )
        tiny = number(smallest(bias_dtype), bias_dtype)
        add("bias", "fp32", number("0x1p-149", "fp32"), "fp32", None, bias_dtype, tiny)
        add("bias", "fp32", number("-0x0p+0", "fp32"), "fp32", None, bias_dtype, number("-0x0p+0", bias_dtype))
        add("bias", "fp32", number("-0x0p+0", "fp32"), "fp32", None, bias_dtype, number(0.0, bias_dtype))
        add("bias", "fp32", number("inf", "fp32"), "fp32", None, bias_dtype, number("-inf", bias_dtype))
        add("bias", "fp32", number(1.0, "fp32"), "fp32", None, bias_dtype, number("nan", bias_dtype))
    for _ in range(12):
        add("bias", "fp64", source.normal("fp64", -4, 4), "fp64", None, "fp64", source.normal("fp64", -4, 4))
    for index in range(160):
        out = ("bf16", "fp16", "fp32")[index % 3]
        bias_dtype = source.choice((out, "fp32"))
        low, high = (
            ((-4, 4), (-24, -14), (-14, 15))[index // 3 % 3]
            if out == "fp16"
            else ((-4, 4), (-126, -118), (-30, 30))[index // 3 % 3]
        )
        bias = source.normal(bias_dtype, max(low, EMIN[bias_dtype]), max(high, EMIN[bias_dtype] + 2))
        add("combined", "fp32", source.normal("fp32", low, high), out, source.integer(1, 9), bias_dtype, bias)
    oracle.answer()
    return {"epilogues": cases}


# ---- linears.json ---------------------------------------------------------------------------------------------------


def linear_operands(source, dtype, rows, columns, length, leaves):
    """Exponents of the products spread over about 60 powers of two; products of distant k cancel in pairs."""
    high = 15 if dtype != "fp16" else 7
    x = [[source.normal(dtype, -15 + (dtype == "fp16"), high) for _ in range(length)] for _ in range(rows)]
    w = [[source.normal(dtype, -15 + (dtype == "fp16"), high) for _ in range(length)] for _ in range(columns)]
    for k in range(length // 3):  # k and its partner fall into different leaves
        partner = length - 1 - k
        for row in x:
            row[partner] = row[k]
        for column in w:
            column[partner] = negate(column[k], dtype)
    return x, w


def linear_case(oracle, command, kind, dtype, length, leaves, shape, x, w, bias, variants):
    rows, columns = shape
    case = {"kind": kind, "dtype": dtype, "L": leaves, "M": rows, "N": columns, "K": length}
    case["x"] = [[text(bits, dtype) for bits in row] for row in x]
    case["w"] = [[text(bits, dtype) for bits in row] for row in w]
    case["bias"] = [text(bits, dtype) for bits in bias]
    case["variants"] = []
    for with_bias, out, wire in variants:

        def keep(words, with_bias=with_bias, out=out, wire=wire):
            values = [value_text(word, out) for word in words]
            count = rows * columns
            grids = [[values[i : i + columns] for i in range(j, j + count, columns)] for j in (0, count)]
            case["variants"].append({"bias": with_bias, "out": out, "wire": wire, "y": grids[0], "flat": grids[1]})

        operands = [*itertools.chain(*x, *w), *(bias if with_bias else [])]
        bias_dtype = dtype if with_bias else "none"
        oracle.ask(keep, command, dtype, wire, out, bias_dtype, (leaves, rows, columns, length), operands)
    oracle.answer()
    return case


def special_operands(dtype, length):
    """Non-finite numbers, signed zeros and subnormals in the operands; NaN leaves as the canonical NaN."""
    source = Source(9000 + FORMATS[dtype])
    x, w = linear_operands(source, dtype, 3, 5, length, 5)
    x[0][4], x[1][20] = number("inf", dtype), number("nan", dtype)
    w[1][4], w[2] = number(0.0, dtype), [number("-0x0p+0", dtype)] * length
    x[2] = [bits & (1 << (BITS[dtype] - 1) | 2 ** FRACTION[dtype] - 1) for bits in x[2]]
    return source, x, w, [number(value, dtype) for value in (0.0, "-0x0p+0", "inf", "-inf", 1.0)]


def make_linears(oracle):
    cases = []

    def add(*case):
        return linear_case(oracle, LINEAR, *case)

    index = 0
    for dtype in FLOATS:
        for length in (1, 5, 7, 16, 33, 64, 100):
            for leaves in (1, 3, 5, 8, 12):
                index += 1
                shape = (1 + index % 3, 1 + index * 2 % 5)
                variants = [(False, dtype, "none"), (True, dtype, "none")]
                if dtype != "fp32":
                    variants += [(False, "fp32", "none"), (True, "fp32", "none")]
                if dtype != "fp64" and index % 2:
                    variants += [(False, "fp32", "bf16"), (True, dtype, "bf16")]
                order_matters = leaves > 1 and length > 2
                for attempt in range(50):
                    source = Source(5000 + 100 * index + attempt)
                    x, w = linear_operands(source, dtype, *shape, length, leaves)
                    bias = [source.normal(dtype, -6, 4) for _ in range(shape[1])]
                    case = add("random", dtype, length, leaves, shape, x, w, bias, variants)
                    if not order_matters or all(v["y"] != v["flat"] for v in case["variants"] if not v["bias"]):
                        break
                cases.append(case)
        source, x, w, bias = special_operands(dtype, 33)
        variants = [(False, dtype, "none"), (True, dtype, "none"), (False, acc_of(dtype), "none")]
        cases.append(add("special", dtype, 33, 5, (3, 5), x, w, bias, variants))
        if dtype in ("fp32", "bf16"):  # products round about 2^-126: the chain flushes, the nodes do not
            x = [[source.normal(dtype, -66, -60) for _ in range(64)] for _ in range(3)]
            w = [[source.normal(dtype, -66, -60) for _ in range(64)] for _ in range(5)]
            bias = [number(0.0, dtype)] * 5
            cases.append(
                add("underflow", dtype, 64, 12, (3, 5), x, w, bias, [(False, dtype, "none"), (False, "fp32", "bf16")])
            )
    return {"linears": cases}


def make_amx(oracle):
    """Blocks of 32: lengths of leaves around one and two of them, odd ones, empty ones."""
    cases, dtype = [], "bf16"
    variants = [(False, "fp32", "none"), (True, "bf16", "none"), (False, "fp32", "bf16")]
    lengths = (1, 2, 31, 32, 33, 47, 63, 64, 65, 96, 100, 161)
    for index, (length, leaves) in enumerate(itertools.product(lengths, (1, 2, 3, 8))):
        shape = (1 + index % 3, 1 + index * 2 % 5)
        source = Source(7000 + index)
        x, w = linear_operands(source, dtype, *shape, length, leaves)
        bias = [source.normal(dtype, -6, 4) for _ in range(shape[1])]
        cases.append(linear_case(oracle, AMX, "random", dtype, length, leaves, shape, x, w, bias, variants))
    source, x, w, bias = special_operands(dtype, 77)
    cases.append(linear_case(oracle, AMX, "special", dtype, 77, 2, (3, 5), x, w, bias, variants))
    for low, high in ((-66, -60), (-64, -62), (-72, -62)):  # halves, their sums and sums of blocks round about 2^-126
        x = [[source.normal(dtype, low, high) for _ in range(100)] for _ in range(3)]
        w = [[source.normal(dtype, low, high) for _ in range(100)] for _ in range(5)]
        cases.append(linear_case(oracle, AMX, "underflow", dtype, 100, 2, (3, 5), x, w, [0] * 5, variants[:1]))
    return {"linears": cases}


# ---- files ----------------------------------------------------------------------------------------------------------

MAKERS = {"cuts": make_cuts, "trees": make_trees, "chains": make_chains, "nodes": make_nodes}
MAKERS |= {"epilogues": make_epilogues, "linears": make_linears, "amx": make_amx}


def dump(tables):
    """One case per line, so that a change shows as the lines of the cases it changes."""
    encoder = json.JSONEncoder(separators=(",", ":"))
    parts = [f'"{name}":[\n' + ",\n".join(map(encoder.encode, cases)) + "\n]" for name, cases in tables.items()]
    return '{"order_version":1,\n' + ",\n".join(parts) + "}\n"


def generate():
    with tempfile.TemporaryDirectory() as folder:
        oracle = Oracle(compile_oracle(folder))
        return {name: (maker(oracle), f"{name}.json") for name, maker in MAKERS.items()}


def main():
    parser = argparse.ArgumentParser(description="Write or check tests/vectors/*.json.")
    parser.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    check = parser.parse_args().check
    if find_compiler() is None:
        sys.exit("no C compiler found (set CC)")
    stale = []
    for tables, file_name in generate().values():
        path, content = VECTORS / file_name, dump(tables)
        if check:
            if not path.is_file() or path.read_text() != content:
                stale.append(file_name)
        else:
            VECTORS.mkdir(exist_ok=True)
            path.write_text(content)
            counts = ", ".join(f"{len(cases)} {name}" for name, cases in tables.items())
            print(f"{file_name}: {len(content)} bytes, {counts}")
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}")


if __name__ == "__main__":
    main()
