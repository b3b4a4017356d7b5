"""Mamba-3 (cases/mamba3.recurrence) in numpy, forward and backward, sharing no code: its state is
complex and never rotated, as the paper's complex recurrence has it. Pairs of channels are complex
numbers, Z_t = exp(-i phi_t) S_t, phi_t the sum of angles so far:

    Z <- exp(g - i theta) (Z + beta prev(B) prev(x)) + gamma B x,   o = scale Re(conj(C) Z)

`wrong`: "rotation" drops it, "border" takes the last token of the sequence before as a first one's
previous, "tap" drops the second term."""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def pairs(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x[..., 0::2] + 1j * x[..., 1::2]


def channels(z: np.ndarray) -> np.ndarray:
    return np.stack([z.real, z.imag], -1).reshape(*z.shape[:-1], -1)


def turning(x: Arrays, wrong: str) -> np.ndarray:
    """exp(g - i theta) [T,H,K/2]; pairs without an angle stay."""
    T, H, P = x["theta"].shape
    theta = np.zeros((T, H, x["C"].shape[-1] // 2))
    theta[..., :P] = 0 if wrong == "rotation" else x["theta"]
    return np.exp(np.asarray(x["g"], np.float64)[..., None] - 1j * theta)


class Sequence:
    """Tokens first .. end - 1 of one sequence; ranks: how many B and x there are."""

    def __init__(
        self, x: Arrays, first: int, end: int, S: np.ndarray, wrong: str, ranks: int
    ) -> None:
        f64 = {n: np.asarray(a, np.float64) for n, a in x.items()}
        self.span, self.wrong = range(first, end), wrong
        names = [""] if ranks == 1 else [str(r) for r in range(1, ranks + 1)]
        self.B = [pairs(f64["B" + n]) for n in names]
        self.x = [f64["x" + n] for n in names]
        H = S.shape[0]
        self.C = pairs(f64["C"]).reshape(len(f64["C"]), H, ranks, -1)
        self.a, self.gamma, self.beta = turning(x, wrong), f64["gamma"], f64["beta"]
        self.first = 0 if wrong == "border" else first
        self.scale = x["C"].shape[-1] ** -0.5
        self.S0 = pairs(S.swapaxes(-1, -2)).swapaxes(-1, -2)  # [H,K/2,V]

    def input(self, t: int) -> np.ndarray:
        return sum(B[t][..., None] * x[t][:, None, :] for B, x in zip(self.B, self.x, strict=True))

    def looks_back(self, t: int) -> bool:
        return t > self.first and self.wrong != "tap"

    def forward(self, o: np.ndarray) -> np.ndarray:
        Z, self.entering, self.after = self.S0, {}, {}
        for t in self.span:
            W = Z
            if self.looks_back(t):
                W = W + self.beta[t][:, None, None] * self.input(t - 1)
            Z = self.a[t][..., None] * W + self.gamma[t][:, None, None] * self.input(t)
            self.entering[t], self.after[t] = W, Z
            read = np.einsum("hrp,hpv->hrv", self.C[t].conj(), Z)
            o[t] = self.scale * read.real.reshape(o[t].shape)
        unit = self.a[self.span.start : self.span.stop]
        self.turn = np.prod(unit.conj() / np.abs(unit), axis=0)[..., None]
        return self.turn * Z

    def backward(self, do: np.ndarray, dht: np.ndarray, y: Arrays) -> np.ndarray:
        end = self.span[-1]
        G = self.turn.conj() * dht
        phi = (dht.conj() * 1j * self.turn * self.after[end]).real.sum(-1)
        P = y["dtheta"].shape[-1]
        for t in reversed(self.span):
            d = do[t].reshape(*self.C[t].shape[:2], -1)
            G = G + self.scale * np.einsum("hrp,hrv->hpv", self.C[t], d)
            dC = self.scale * np.einsum("hpv,hrv->hrp", self.after[t], d)
            y["dC"][t] = channels(dC.reshape(-1, dC.shape[-1]))
            y["dgamma"][t] = (G.conj() * self.input(t)).real.sum((-1, -2))
            self.write(t, self.gamma[t], G, y)
            da = (self.entering[t].conj() * G).sum(-1)
            y["dg"][t] = (da.conj() * self.a[t]).real.sum(-1)
            y["dtheta"][t] = ((da.conj() * -1j * self.a[t]).real + phi)[:, :P]
            G = self.a[t].conj()[..., None] * G
            if self.looks_back(t):
                y["dbeta"][t] = (G.conj() * self.input(t - 1)).real.sum((-1, -2))
                self.write(t - 1, self.beta[t], G, y)
        return G

    def write(self, t: int, by: np.ndarray, G: np.ndarray, y: Arrays) -> None:
        for r, (B, x) in enumerate(zip(self.B, self.x, strict=True)):
            n = str(r + 1) if len(self.B) > 1 else ""
            y["dB" + n][t] += channels(by[:, None] * np.einsum("hpv,hv->hp", G, x[t]))
            y["dx" + n][t] += by[:, None] * np.einsum("hp,hpv->hv", B[t].conj(), G).real


def kernel(x: Arrays, cu: Any = None, wrong: str = "", ranks: int = 1) -> Arrays:
    """All results of inputs by the names of cases/mamba3.recurrence, in fp32; sequences by cu."""
    cu = cu or [0, len(x["C"])]
    names = [n for n in x if n not in ("do", "dht", "initial_state")]
    y = {"d" + n: np.zeros(x[n].shape) for n in names}
    v = x["x" if ranks == 1 else "x1"]
    y["o"] = np.zeros((*x["C"].shape[:2], v.shape[-1]))
    states = []
    for i, (first, end) in enumerate(zip(cu, cu[1:], strict=False)):
        s = Sequence(x, first, end, x["initial_state"][i], wrong, ranks)
        S = s.forward(y["o"])
        dht = x["dht"][i] if "dht" in x else np.zeros(x["initial_state"][i].shape)
        G = s.backward(
            np.asarray(x["do"], np.float64), pairs(dht.swapaxes(-1, -2)).swapaxes(-1, -2), y
        )
        states.append([channels(z.swapaxes(-1, -2)).swapaxes(-1, -2) for z in (S, G)])
    y["final_state"], y["dh0"] = (np.stack(z) for z in zip(*states, strict=True))
    return {n: a.astype(np.float32) for n, a in y.items()}


def inputs(
    T: int, H: int, K: int, V: int, P: int, seqs: int = 1, ranks: int = 1, seed: int = 7
) -> Arrays:
    """As the layer makes them: DT a softplus, theta DT tanh(..) pi, gamma and beta of one trap."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    DT = np.log1p(np.exp(normal(T, H) - 1))
    trap = 1 / (1 + np.exp(-normal(T, H)))
    x = {"C": normal(T, H * ranks, K), "g": -DT * (0.1 + np.abs(normal(T, H)))}
    for r in range(1, ranks + 1):
        n = str(r) if ranks > 1 else ""
        x |= {"B" + n: normal(T, H, K) * K**-0.5, "x" + n: normal(T, H, V)}
    x |= {"gamma": DT * trap, "beta": DT * (1 - trap)}
    x |= {"theta": DT[..., None] * np.tanh(normal(T, H, P)) * np.pi, "do": normal(T, H * ranks, V)}
    x |= {"initial_state": normal(seqs, H, K, V), "dht": normal(seqs, H, K, V)}
    return {n: a.astype(np.float32) for n, a in x.items()}
