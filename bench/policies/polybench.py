"""PolyBench's kernels that are Maps, Reduces and Scans, as Programs written from their mathematical definitions.

Sizes are given as PolyBench names them; `SIZES` are such that a kernel has 60 thousand to 25 million points. What has
no such form without taking elements one by one (`seidel-2d`, `lu`, `cholesky`, `ludcmp`, `durbin`, `nussinov`, `adi`)
and `gramschmidt` are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.ir.forms.compute import Program
from tilewright.ir.text.parse import parse_program

_A, _B = 1.5, 1.2  # alpha and beta, as PolyBench sets them

_TEXTS: Mapping[str, str] = {
    "gemm": """
input A: float32[{NI}, {NK}]  input B: float32[{NK}, {NJ}]  input C: float32[{NI}, {NJ}]
P: float32[i:{NI}, j:{NJ}] = sum[k:{NK}] A[i, k] * B[k, j]
R: float32[i:{NI}, j:{NJ}] = {a} * P[i, j] + {b} * C[i, j]
output R
""",
    "2mm": """
input A: float32[{NI}, {NK}]  input B: float32[{NK}, {NJ}]  input C: float32[{NJ}, {NL}]  input D: float32[{NI}, {NL}]
P: float32[i:{NI}, j:{NJ}] = sum[k:{NK}] A[i, k] * B[k, j]
T: float32[i:{NI}, j:{NJ}] = {a} * P[i, j]
Q: float32[i:{NI}, l:{NL}] = sum[j:{NJ}] T[i, j] * C[j, l]
R: float32[i:{NI}, l:{NL}] = Q[i, l] + {b} * D[i, l]
output R
""",
    "3mm": """
input A: float32[{NI}, {NK}]  input B: float32[{NK}, {NJ}]  input C: float32[{NJ}, {NM}]  input D: float32[{NM}, {NL}]
E: float32[i:{NI}, j:{NJ}] = sum[k:{NK}] A[i, k] * B[k, j]
F: float32[j:{NJ}, l:{NL}] = sum[m:{NM}] C[j, m] * D[m, l]
G: float32[i:{NI}, l:{NL}] = sum[j:{NJ}] E[i, j] * F[j, l]
output G
""",
    "atax": """
input A: float32[{M}, {N}]  input x: float32[{N}]
T: float32[i:{M}] = sum[j:{N}] A[i, j] * x[j]
y: float32[j:{N}] = sum[i:{M}] A[i, j] * T[i]
output y
""",
    "bicg": """
input A: float32[{N}, {M}]  input p: float32[{M}]  input r: float32[{N}]
s: float32[j:{M}] = sum[i:{N}] r[i] * A[i, j]
q: float32[i:{N}] = sum[j:{M}] A[i, j] * p[j]
output s  output q
""",
    "mvt": """
input A: float32[{N}, {N}]  input x1: float32[{N}]  input x2: float32[{N}]
input y1: float32[{N}]  input y2: float32[{N}]
s1: float32[i:{N}] = sum[j:{N}] A[i, j] * y1[j]
s2: float32[i:{N}] = sum[j:{N}] A[j, i] * y2[j]
z1: float32[i:{N}] = x1[i] + s1[i]
z2: float32[i:{N}] = x2[i] + s2[i]
output z1  output z2
""",
    "gemver": """
input A: float32[{N}, {N}]  input u1: float32[{N}]  input v1: float32[{N}]
input u2: float32[{N}]  input v2: float32[{N}]
input y: float32[{N}]  input z: float32[{N}]
B: float32[i:{N}, j:{N}] = A[i, j] + u1[i] * v1[j] + u2[i] * v2[j]
s: float32[i:{N}] = sum[j:{N}] B[j, i] * y[j]
x: float32[i:{N}] = {b} * s[i] + z[i]
t: float32[i:{N}] = sum[j:{N}] B[i, j] * x[j]
w: float32[i:{N}] = {a} * t[i]
output B  output x  output w
""",
    "gesummv": """
input A: float32[{N}, {N}]  input B: float32[{N}, {N}]  input x: float32[{N}]
s: float32[i:{N}] = sum[j:{N}] A[i, j] * x[j]
t: float32[i:{N}] = sum[j:{N}] B[i, j] * x[j]
y: float32[i:{N}] = {a} * s[i] + {b} * t[i]
output y
""",
    "syrk": """
input A: float32[{N}, {M}]  input C: float32[{N}, {N}]
P: float32[i:{N}, j:{N}] = sum[k:{M}] A[i, k] * A[j, k]
R: float32[i:{N}, j:{N}] = select(j <= i, {a} * P[i, j] + {b} * C[i, j], C[i, j])
output R
""",
    "syr2k": """
input A: float32[{N}, {M}]  input B: float32[{N}, {M}]  input C: float32[{N}, {N}]
P: float32[i:{N}, j:{N}] = sum[k:{M}] A[j, k] * B[i, k]
Q: float32[i:{N}, j:{N}] = sum[k:{M}] B[j, k] * A[i, k]
R: float32[i:{N}, j:{N}] = select(j <= i, {a} * (P[i, j] + Q[i, j]) + {b} * C[i, j], C[i, j])
output R
""",
    "trmm": """
input A: float32[{M}, {M}]  input B: float32[{M}, {N}]
P: float32[i:{M}, j:{N}] = sum[k:{M}] select(i < k, A[k, i], 0.0) * B[k, j]
R: float32[i:{M}, j:{N}] = {a} * (B[i, j] + P[i, j])
output R
""",
    "symm": """
input A: float32[{M}, {M}]  input B: float32[{M}, {N}]  input C: float32[{M}, {N}]
S: float32[i:{M}, k:{M}] = select(k <= i, A[i, k], A[k, i])
P: float32[i:{M}, j:{N}] = sum[k:{M}] S[i, k] * B[k, j]
R: float32[i:{M}, j:{N}] = {b} * C[i, j] + {a} * P[i, j]
output R
""",
    "doitgen": """
input A: float32[{NR}, {NQ}, {NP}]  input C: float32[{NP}, {NP}]
R: float32[r:{NR}, q:{NQ}, p:{NP}] = sum[s:{NP}] A[r, q, s] * C[s, p]
output R
""",
    "covariance": """
input D: float32[{N}, {M}]
s: float32[j:{M}] = sum[i:{N}] D[i, j]
E: float32[i:{N}, j:{M}] = D[i, j] - s[j] * {n}
P: float32[i:{M}, j:{M}] = sum[k:{N}] E[k, i] * E[k, j]
R: float32[i:{M}, j:{M}] = P[i, j] * {n1}
output R
""",
    "correlation": """
input D: float32[{N}, {M}]
s: float32[j:{M}] = sum[i:{N}] D[i, j]
E: float32[i:{N}, j:{M}] = D[i, j] - s[j] * {n}
v: float32[j:{M}] = sum[i:{N}] E[i, j] * E[i, j]
d: float32[j:{M}] = sqrt(v[j] * {n})
F: float32[i:{N}, j:{M}] = E[i, j] / ({r} * select(d[j] <= 0.1, 1.0, d[j]))
P: float32[i:{M}, j:{M}] = sum[k:{N}] F[k, i] * F[k, j]
R: float32[i:{M}, j:{M}] = select(i == j, 1.0, P[i, j])
output R
""",
    "jacobi-1d": """
input A: float32[{N}]
scan[t:{T}]
  carry before: float32[{N}] = A then after give R: float32[{N}]
  do
    B: float32[i:{N}] = select(0 < i and i < {N1}, 0.33333 * (before[i - 1] + before[i] + before[i + 1]), before[i])
    after: float32[i:{N}] = select(0 < i and i < {N1}, 0.33333 * (B[i - 1] + B[i] + B[i + 1]), B[i])
end
output R
""",
    "jacobi-2d": """
input A: float32[{N}, {N}]
scan[t:{T}]
  carry before: float32[{N}, {N}] = A then after give R: float32[{N}, {N}]
  do
    B: float32[i:{N}, j:{N}] = select(0 < i and i < {N1} and 0 < j and j < {N1}, 0.2 * (before[i, j] + before[i, j \
      - 1] + before[i, j + 1] + before[i + 1, j] + before[i - 1, j]), before[i, j])
    after: float32[i:{N}, j:{N}] = select(0 < i and i < {N1} and 0 < j and j < {N1}, 0.2 * (B[i, j] + B[i, j - 1] + \
      B[i, j + 1] + B[i + 1, j] + B[i - 1, j]), B[i, j])
end
output R
""",
    "heat-3d": """
input A: float32[{N}, {N}, {N}]
scan[t:{T}]
  carry before: float32[{N}, {N}, {N}] = A then after give R: float32[{N}, {N}, {N}]
  do
    B: float32[i:{N}, j:{N}, k:{N}] = select(0 < i and i < {N1} and 0 < j and j < {N1} and 0 < k and k < {N1}, \
      0.125 * (before[i + 1, j, k] - 2.0 * before[i, j, k] + before[i - 1, j, k]) + 0.125 * (before[i, j + 1, k] - \
      2.0 * before[i, j, k] + before[i, j - 1, k]) + 0.125 * (before[i, j, k + 1] - 2.0 * before[i, j, k] + \
      before[i, j, k - 1]) + before[i, j, k], before[i, j, k])
    after: float32[i:{N}, j:{N}, k:{N}] = select(0 < i and i < {N1} and 0 < j and j < {N1} and 0 < k and k < {N1}, \
      0.125 * (B[i + 1, j, k] - 2.0 * B[i, j, k] + B[i - 1, j, k]) + 0.125 * (B[i, j + 1, k] - 2.0 * B[i, j, k] + \
      B[i, j - 1, k]) + 0.125 * (B[i, j, k + 1] - 2.0 * B[i, j, k] + B[i, j, k - 1]) + B[i, j, k], B[i, j, k])
end
output R
""",
    "fdtd-2d": """
input ex: float32[{NX}, {NY}]  input ey: float32[{NX}, {NY}]  input hz: float32[{NX}, {NY}]  input f: float32[{T}]
scan[t:{T}]
  carry x0: float32[{NX}, {NY}] = ex then x1 give X: float32[{NX}, {NY}]
  carry y0: float32[{NX}, {NY}] = ey then y1 give Y: float32[{NX}, {NY}]
  carry h0: float32[{NX}, {NY}] = hz then h1 give H: float32[{NX}, {NY}]
  do
    y1: float32[i:{NX}, j:{NY}] = select(0 < i, y0[i, j] - 0.5 * (h0[i, j] - h0[i - 1, j]), f[t])
    x1: float32[i:{NX}, j:{NY}] = select(0 < j, x0[i, j] - 0.5 * (h0[i, j] - h0[i, j - 1]), x0[i, j])
    h1: float32[i:{NX}, j:{NY}] = select(i < {NX1} and j < {NY1}, h0[i, j] - 0.7 * (x1[i, j + 1] - x1[i, j] + y1[i \
      + 1, j] - y1[i, j]), h0[i, j])
end
output X  output Y  output H
""",
    "floyd-warshall": """
input A: float32[{N}, {N}]
scan[k:{N}]
  carry before: float32[{N}, {N}] = A then after give R: float32[{N}, {N}]
  do
    after: float32[i:{N}, j:{N}] = min(before[i, j], before[i, k] + before[k, j])
end
output R
""",
    "deriche": """
input A: float32[{H}, {W}]
Z: float32[i:{W}] = 0.0
V: float32[i:{H}] = 0.0
scan[i:{H}]
  carry p1: float32[{W}] = Z then c1
  carry p2: float32[{W}] = Z then p3
  stack Y1: float32[{H}, {W}] = c1
  do
    p3: float32[j:{W}] = p1[j]
    c1: float32[j:{W}] = 0.5 * A[i, j] + 0.2 * select(0 < i, A[i - 1, j], 0.0) + 0.3 * p1[j] - 0.1 * p2[j]
end
scan[i:{H}] reverse
  carry q1: float32[{W}] = Z then d1
  carry q2: float32[{W}] = Z then q3
  stack Y2: float32[{H}, {W}] = d1
  do
    q3: float32[j:{W}] = q1[j]
    d1: float32[j:{W}] = 0.4 * select(i < {H1}, A[i + 1, j], 0.0) + 0.1 * select(i < {H2}, A[i + 2, j], 0.0) + 0.3 \
      * q1[j] - 0.1 * q2[j]
end
I: float32[i:{H}, j:{W}] = Y1[i, j] + Y2[i, j]
scan[j:{W}]
  carry u1: float32[{H}] = V then e1
  carry u2: float32[{H}] = V then u3
  stack Y3: float32[{W}, {H}] = e1
  do
    u3: float32[i:{H}] = u1[i]
    e1: float32[i:{H}] = 0.5 * I[i, j] + 0.2 * select(0 < j, I[i, j - 1], 0.0) + 0.3 * u1[i] - 0.1 * u2[i]
end
scan[j:{W}] reverse
  carry w1: float32[{H}] = V then g1
  carry w2: float32[{H}] = V then w3
  stack Y4: float32[{W}, {H}] = g1
  do
    w3: float32[i:{H}] = w1[i]
    g1: float32[i:{H}] = 0.4 * select(j < {W1}, I[i, j + 1], 0.0) + 0.1 * select(j < {W2}, I[i, j + 2], 0.0) + 0.3 \
      * w1[i] - 0.1 * w2[i]
end
R: float32[i:{H}, j:{W}] = Y3[j, i] + Y4[j, i]
output R
""",
    "trisolv": """
input L: float32[{N}, {N}]  input b: float32[{N}]
Z: float32[i:{N}] = 0.0
scan[i:{N}]
  carry x0: float32[{N}] = Z then x1 give x: float32[{N}]
  do
    s: float32[a:1] = sum[j:{N}] L[i, j] * x0[j]
    x1: float32[j:{N}] = select(j == i, (b[i] - s[0]) / L[i, i], x0[j])
end
output x
""",
}

SIZES: Mapping[str, Mapping[str, int]] = {
    "gemm": {"NI": 200, "NJ": 220, "NK": 240},
    "2mm": {"NI": 180, "NJ": 190, "NK": 210, "NL": 220},
    "3mm": {"NI": 180, "NJ": 190, "NK": 200, "NL": 210, "NM": 220},
    "atax": {"M": 1900, "N": 2100},
    "bicg": {"M": 1900, "N": 2100},
    "mvt": {"N": 2000},
    "gemver": {"N": 1000},
    "gesummv": {"N": 1300},
    "syrk": {"M": 200, "N": 240},
    "syr2k": {"M": 200, "N": 240},
    "trmm": {"M": 200, "N": 240},
    "symm": {"M": 200, "N": 240},
    "doitgen": {"NQ": 40, "NR": 50, "NP": 60},
    "covariance": {"M": 240, "N": 260},
    "correlation": {"M": 240, "N": 260},
    "jacobi-1d": {"T": 40, "N": 20000},
    "jacobi-2d": {"T": 20, "N": 400},
    "heat-3d": {"T": 20, "N": 60},
    "fdtd-2d": {"T": 20, "NX": 400, "NY": 480},
    "floyd-warshall": {"N": 256},
    "deriche": {"W": 480, "H": 320},
    "trisolv": {"N": 1000},
}


def program(name: str, sizes: Mapping[str, int] | None = None) -> Program:
    """A kernel of these sizes."""
    given = dict(sizes or SIZES[name])
    values: dict[str, object] = {"a": _A, "b": _B, **given}
    values.update({f"{key}{less}": size - less for key, size in given.items() for less in (1, 2)})
    if "N" in given:
        values.update(n=1 / given["N"], n1=1 / max(1, given["N"] - 1), r=given["N"] ** 0.5)
    lines = _TEXTS[name].format_map(values).strip().replace("  input", "\ninput").replace("  output", "\noutput")
    return parse_program("program\n" + lines + "\nend\n", {})
