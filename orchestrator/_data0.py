"""Stopgap until the packing package lands."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq

from orchestrator.feeder import StepFeed
from orchestrator.ports import StepSummary
from prestage.microbatch import MicroBatch, MicroBatchId
from prestage.wire.digest import content_digest


class RecordedSource:
    def __init__(self, path, run_id, rows, tokens, groups_per_step):
        t = pq.read_table(path).to_pydict()
        self.groups = {}
        for i, g in enumerate(t["group_id"]):
            self.groups.setdefault(g, []).append(
                (t["prompt_tokens"][i], t["completion_tokens"][i], t["logprobs"][i], t["reward"][i])
            )
        self.names = list(self.groups)
        self.run_id, self.rows, self.tokens, self.n = run_id, rows, tokens, groups_per_step

    def open_step(self, step):
        k = len(self.names)
        names = [self.names[(step * self.n + i) % k] for i in range(self.n)]
        items = []
        rewards = []
        for name in names:
            g = self.groups[name]
            r = np.array([x[3] for x in g], np.float64)
            rewards += list(r)
            adv = (r - r.mean()) / (r.std() + 1e-6)
            items += [(p, c, lp, a) for (p, c, lp, _), a in zip(g, adv)]
        order = sorted(range(len(items)), key=lambda i: -(len(items[i][0]) + len(items[i][1])))
        bins = []
        for i in order:
            n = len(items[i][0]) + len(items[i][1])
            for b in bins:
                if b[0] + n <= self.tokens:
                    b[0] += n
                    b[1].append(i)
                    break
            else:
                bins.append([n, [i]])
        m = -(-len(bins) // self.rows)

        def make():
            for index in range(m):
                rows = bins[index::m]
                yield self._write(step, index, rows, items)

        real = sum(b[0] for b in bins)
        return StepFeed(
            summary=StepSummary(
                step=step, micro_batches=m, groups=len(names), trajectories=len(items),
                real_tokens=real, trained_tokens=sum(len(c) for _, c, _, _ in items),
                rows=len(bins), reward_mean=float(np.mean(rewards)),
            ),
            micro_batches=make(),
        )

    def _write(self, step, index, rows, items):
        R, T = self.rows, self.tokens
        a = {
            "tokens": np.zeros((R, T), np.int32), "segment_ids": np.zeros((R, T), np.int32),
            "positions": np.zeros((R, T), np.int32), "loss_mask": np.zeros((R, T), np.uint8),
            "advantages": np.zeros((R, T), np.float32),
            "sampling_logprobs": np.zeros((R, T), np.float32),
        }
        lengths = [0] * R
        for r, (n, idx) in enumerate(rows):
            o = 0
            for s, i in enumerate(idx, start=1):
                p, c, lp, adv = items[i]
                L, P = len(p) + len(c), len(p)
                a["tokens"][r, o : o + L] = p + c
                a["segment_ids"][r, o : o + L] = s
                a["positions"][r, o : o + L] = np.arange(L)
                a["loss_mask"][r, o + P : o + L] = 1
                a["advantages"][r, o : o + L] = adv
                a["sampling_logprobs"][r, o + P : o + L] = lp
                o += L
            lengths[r] = o
        d = content_digest(a, rows=R, tokens_per_row=T, row_lengths=lengths)
        return MicroBatch(
            id=MicroBatchId(run_id=self.run_id, step=step, index=index), rows=R,
            tokens_per_row=T, row_lengths=tuple(lengths), arrays=a, digest=d,
        )

    def data_cursor(self, next_step):
        return f'{{"next_step": {next_step}}}'

    def step_durable(self, step):
        pass
