"""Reader of causal language models' batches, without a limit at the hidden size.

The head's rows say which token follows a prefix (`next_token_rows`), so sentences are grown from their starts (`decoder_prefixes`). What a
found sentence adds to the rows is computed and taken out, which makes the rest clearer; that is repeated until nothing new is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from leakaudit.algorithms.rare_rows.decoder_prefixes import Path, PrefixStates, grow
from leakaudit.algorithms.rare_rows.next_token_rows import NextTokenRows, gains, whitener
from leakaudit.algorithms.rare_rows.sentence_rows import SentenceRows, WordTables, find_tables, rows_of
from leakaudit.client.observation import Observation
from leakaudit.plugins.budget import Budget

SAMPLES, SAMPLE_LENGTH = 64, 20


class Batch:
    """working state"""

    def __init__(self, seen: Observation, rng: torch.Generator, verbose=None):
        self.seen = seen
        self.tables = find_tables(seen)
        self.model = seen.model
        self.head = seen.model.get_parameter(self.tables.head).detach()
        self.update = seen.update[self.tables.head].float()
        self.states = PrefixStates(seen.model)
        self.found: list[tuple[int, ...]] = []
        self.taken: SentenceRows | None = None
        self.vocab = seen.facts.vocabulary
        self.bag = self.update.norm(dim=1).topk(min(64, len(self.update))).indices.sort().values
        self.sample(rng)
        self.scale = self.find_scale()

    def starts(self) -> Tensor:
        name = self.tables.words
        if not self.tables.tied and name in self.seen.update:
            t = self.seen.update[name].any(dim=1).nonzero().flatten()
        else:
            t = self.bag if self.tables.tied else torch.arange(len(self.head))
        pre = torch.tensor(self.vocab.starts_with, dtype=torch.long).expand(len(t), -1)
        return torch.cat([pre, t[:, None]], 1)

    def sample(self, rng):
        # norms as weights
        w = self.update.norm(dim=1)
        keep = (w > 0.05 * w.max()).nonzero().flatten() if False else w.topk(min(len(w), 600)).indices
        p = w[keep] / w[keep].sum()
        pre = torch.tensor(self.vocab.starts_with, dtype=torch.long).expand(SAMPLES, -1)
        ids = torch.cat([pre, keep[torch.multinomial(p, SAMPLES, True, generator=rng)][:, None]], 1)
        h = self.states.start(ids)
        for _ in range(SAMPLE_LENGTH):
            q = 0.5 * (h @ self.head[keep].T).softmax(1) + 0.5 * p
            h = self.states.extend(torch.arange(SAMPLES), keep[torch.multinomial(q, 1, generator=rng)[:, 0]])
        self.samples = self.states.paths
        self.memo = {}
        self.states2 = PrefixStates(self.model)
        self.moments(rows_of(self.seen, self.states.paths.tolist(), self.tables))

    def moments(self, s: SentenceRows):
        m = s.states.T @ s.states / s.targets
        if self.tables.tied:
            d = torch.cat([i[:-1] for i in s.inputs])
            m = m + d.T @ d / len(d)
        self.white = whitener(m)
        m = m.double()
        self.mass = torch.linalg.solve(m + 1e-7 * m.diagonal().mean() * torch.eye(len(m)), s.states.mean(0).double()).float()
        self.size = float((s.states @ self.white).square().sum(1).mean()) / len(m)
        self.mean_background = s.background / s.targets

    def longest(self):
        from leakaudit.models.structure.embeddings import other_tables
        used = {id(m) for m in self.model.modules()}
        for name in other_tables(self.model, self.tables.words, used):
            if name in self.seen.update and len(self.seen.update[name]) < 100000:
                n = int(self.seen.update[name].any(1).sum())
                if n: return n + 1
        return 64

    def find_scale(self):
        a = self.mean_background - self.update  # (V, D) sums over N
        r = a @ self.white
        size = r.square().sum(1)
        big = size.topk(min(2000, len(size))).indices
        pre = self.starts() if not self.tables.tied else big[:, None]
        x = torch.cat([self.states.alone(c) for c in pre.split(4096)]) @ self.white
        dot = x @ r[big].T
        cos = dot / x.norm(dim=1, keepdim=True) / r[big].norm(dim=1)
        flat = cos.flatten().topk(200)
        n = (x.square().sum(1, keepdim=True) / dot).flatten()[flat.indices]
        self.log("scale votes", [(round(c, 3), round(v, 1)) for c, v in zip(flat.values.tolist()[:12], n.tolist()[:12])])
        w = -(1 - flat.values.clamp_max(0.999) ** 2).log()
        z = n.log()
        dens = (w[None] * (-0.5 * ((z[:, None] - z[None]) / 0.03) ** 2).exp()).sum(1)
        at = int(dens.argmax())
        k = w * (-0.5 * ((z - z[at]) / 0.03) ** 2).exp()
        self.log("density", float(dens[at]), float(n[at]))
        return float(((k * z).sum() / k.sum()).exp())

    def log(self, *a):
        print(*a, flush=True)

    def rows(self) -> NextTokenRows:
        """residual rows"""
        n = self.scale
        left = -n * self.update
        remaining = n
        if self.taken is not None:
            left = left - self.taken.head
            remaining = max(0.0, n - self.taken.targets)
        left = left + remaining * self.mean_background
        r = left @ self.white
        size = r.square().sum(1) / r.shape[1]
        self.bag = (size > 0.05).nonzero().flatten()
        bg = remaining * self.mean_background[self.bag] @ self.white
        noise = 0.02 * self.size + (0.3 * bg).square().sum(1) / r.shape[1]
        count = left[self.bag] @ self.mass
        rest = (count - 1).clamp_min(0.0)
        if self.tables.tied:
            noise = torch.maximum(noise, size[self.bag] - count.clamp_min(0.0) * self.size)
        return NextTokenRows(self.bag, self.white, r[self.bag], self.head[self.bag], rest * self.size + noise, count)

    def typical(self, paths):
        """states of the same last tokens after other prefixes of the same length"""
        length = paths.shape[1]
        last, place = paths[:, -1].unique(return_inverse=True)
        key = (length, 0)
        known = self.memo.setdefault(length, {})
        need = torch.tensor([t for t in last.tolist() if t not in known], dtype=torch.long)
        if len(need):
            k = min(4, len(self.samples))
            pre = self.samples[:k, : length - 1] if length > 1 else self.samples[:1, :0]
            if pre.shape[1] < length - 1:
                pre = torch.cat([pre, pre[:, -1:].expand(-1, length - 1 - pre.shape[1])], 1)
            acc = 0
            if length > 1:
                for row in pre:
                    self.states2.start(row[None])
                    acc = acc + self.states2.extend(torch.zeros(len(need), dtype=torch.long), need)
                acc = acc / len(pre)
            else:
                acc = self.states2.alone(need[:, None]).mean(0, keepdim=True).expand(len(need), -1)
            for t, m in zip(need.tolist(), acc):
                known[t] = m
        return torch.stack([known[t] for t in last.tolist()])[place]


def rescored(b: Batch, rows: NextTokenRows, path: Sequence[int], states: Tensor, changed_rows) -> tuple[float, Tensor, Tensor]:
    """evidence of path on current rows"""
    pre = len(b.vocab.starts_with)
    x = states @ rows.white
    pr = rows.prior(states)
    idx = rows.index_of(torch.tensor(path[pre + 1 :]))
    total = 0.0
    typ = torch.stack([b.memo.get(pre + k + 1, {}).get(path[pre + k], states[k] * 0) for k in range(len(idx))]) @ rows.white
    width = rows.rows.shape[1]
    changed: dict[int, Tensor] = {}
    for k, v in enumerate(idx.tolist()):
        row, count, spread = changed.get(v) or (rows.rows[v], rows.count[v], rows.spread[v])
        total += float(gains(x[k : k + 1], row[None], width, typ[k : k + 1], spread[None], count[None])) + float(pr[k, v])
        row = row - x[k]
        changed[v] = (row, count - 1, torch.maximum(spread - b.size, spread * 0 + 0.02 * b.size))
    return total, idx, changed


def recover_decoder(seen, rng, budget, truth=None, tok=None, rounds=8):
    b = Batch(seen, rng)
    b.log("scale", b.scale)
    import time
    thr = 15.0
    pre = len(b.vocab.starts_with)
    for rnd in range(rounds):
        t0 = time.time()
        rows = b.rows()
        paths = grow(b.states, rows, b.starts(), b.longest(), budget, b.typical)
        t1 = time.time()
        cand = [p for p in paths if p.evidence > thr][:3000]
        acc = []
        rare = set(rows.tokens[rows.count < 1.5].tolist())
        used = set()
        tried = 0
        for p in cand:
            mine = [t for t in p.tokens[pre + 1:] if t in rare]
            if not mine or len([t for t in mine if t in used]) > 0 or len(set(mine)) < len(mine):
                continue
            tried += 1
            ev, idx, changed = rescored(b, rows, p.tokens, run_states(b, p.tokens), None)
            if ev > thr and ev > 0.6 * p.evidence:
                acc.append(p)
                used |= set(mine)
                for v, (row, count, spread) in changed.items():
                    rows.rows[v] = row
                    rows.count[v] = count
                    rows.spread[v] = spread
        b.found += [p.tokens for p in acc]
        if acc:
            b.taken = rows_of(b.seen, b.found, b.tables)
            if b.taken.targets > 60:
                b.moments(b.taken)
        if truth is not None:
            T = [tuple(x) for x in truth]
            left = list(T)
            ex = 0
            for f in b.found:
                if f in left:
                    left.remove(f)
                    ex += 1
            print(f"round {rnd} thr {thr}: bag {len(b.bag)} paths {len(paths)} cand {len(cand)} tried {tried} acc {len(acc)} exact {ex}/{len(b.found)} of {len(T)}; targets {b.taken.targets if b.taken else 0} of {b.scale:.1f}; grow {t1-t0:.1f} rest {time.time()-t1:.1f}", flush=True)
            wrong = [f for f in b.found if f not in T]
            if tok is not None:
                for f in wrong[:8]:
                    print("    wrong:", tok.decode(f))
                for f in left[:8]:
                    print("    missing:", tok.decode(f))
        if not acc:
            if thr < 4: break
            thr = thr/2
        # refine scale
        if acc: refine(b)
    return b


def refine(b: Batch):
    t = b.taken
    # rows whose update is explained nearly
    g = -b.update
    left = b.scale*g - t.head + max(0.0, b.scale - t.targets) * b.mean_background
    good = (t.head.norm(dim=1) > 1.0) & (left.norm(dim=1) < 0.05 * t.head.norm(dim=1))
    if int(good.sum()) < 5:
        return
    x, y = g[good], t.head[good]
    n = float((y*x).sum() / (x * x).sum())
    b.log("refined scale", n, int(good.sum()))
    b.scale = n


def run_states(b, tokens):
    from leakaudit.models.structure.trace import run_until
    pre = len(b.vocab.starts_with)
    return run_until(b.model, torch.tensor([tokens]), b.model.get_output_embeddings())[0, pre:-1].float()
