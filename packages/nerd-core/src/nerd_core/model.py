"""FlashNerd: a small streaming transformer that predicts how a robot moves in one model step.

Open this module first. ``forward`` reads a whole window (training), ``step`` one time sample and a cache
(everything else); both give the same numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .codec import StateCodec
from .normalizer import Normalizer, Total, alone
from .robot import RobotSpec

__all__ = ["FlashNerd", "FlashNerdConfig", "KVCache"]


@dataclass(frozen=True, kw_only=True)
class FlashNerdConfig:
    """Sizes of a :class:`FlashNerd`.

    Attributes:
        width: Model width d.
        heads: Attention heads H; d must be a multiple.
        spans: Time samples that each block attends to, the current one included; one entry per block.
        hidden: Width f of the gated feedforward.
        readout_hidden: Width of the readout's hidden layer.
        kinematic: Predict position changes as the residual of what the velocity change explains.
        readout_sharpness: Standard deviation that a typical frame gives the inputs of the readout's hidden units at
            the start; 0 leaves them as PyTorch starts them, far below 1. Around 3 the units bend often enough
            within the data for joint limits and other kinks to be fitted at once; worth it for few channels.
    """

    width: int = 128
    heads: int = 4
    spans: tuple[int, ...] = (3, 3, 3)
    hidden: int = 256
    readout_hidden: int = 128
    kinematic: bool = True
    readout_sharpness: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(self.spans))
        for name in ("width", "heads", "hidden", "readout_hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}, expected a multiple of heads ({self.heads})")
        if not 0 <= self.readout_sharpness < float("inf"):
            raise ValueError(f"readout_sharpness is {self.readout_sharpness}, expected at least 0")
        if not self.spans or min(self.spans) < 1:
            raise ValueError(f"spans is {self.spans}, expected at least one block, each span at least 1")

    @property
    def receptive_field(self) -> int:
        """Time samples that can influence a prediction: R = 1 + Σ (S - 1)."""
        return 1 + sum(s - 1 for s in self.spans)


class KVCache(NamedTuple):
    """Past keys and values of every block, in rings that are overwritten, never shifted.

    A value: passed in and returned, never stored in a module. Slot ``cursor % S`` of a block takes the next pair.

    Attributes:
        keys: Keys per block, shapes (B, S, H, D).
        values: Values per block, shapes (B, S, H, D).
        valid: Time samples seen since the row's last reset, shape (B,), int64.
        cursor: Time samples seen by the cache as a whole, shape (), int64; a tensor, so that captured graphs and
            exported models can hold it.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    valid: Tensor
    cursor: Tensor

    def reset(self, mask: Tensor) -> "KVCache":
        """Forget the history of the rows where ``mask``, shape (B,), is true; other rows are untouched.

        The slots are zeroed too: a masked weight is 0, but 0 · NaN is NaN.
        """
        row = mask[:, None, None, None]
        return KVCache(
            tuple(torch.where(row, torch.zeros_like(k), k) for k in self.keys),
            tuple(torch.where(row, torch.zeros_like(v), v) for v in self.values),
            torch.where(mask, torch.zeros_like(self.valid), self.valid),
            self.cursor,
        )

    def expand(self, n: int) -> "KVCache":
        """Fork a history of one row into ``n`` rows."""
        if self.valid.shape[0] != 1:
            raise ValueError(f"cache has {self.valid.shape[0]} rows, expected 1 to expand")
        return KVCache(
            tuple(k.expand(n, -1, -1, -1).contiguous() for k in self.keys),
            tuple(v.expand(n, -1, -1, -1).contiguous() for v in self.values),
            self.valid.expand(n).contiguous(),
            self.cursor,
        )


class Block(nn.Module):
    """Attention over the span and a gated feedforward, in parallel, one projection in and one out.

    ::

        u = RMSNorm(x_t);   [q k v a b] = u W_in              W_in: d → 3d + 2f
        att = Σ_{j<S} softmax_j( q·k_{t-j} / √D + β[h, j] ) v_{t-j}
        x_t ← x_t + [att ; silu(a) ⊙ b] W_out                 W_out: d + f → d

    Source: FlashNeRD Fig. 1b, 2. Chosen here: RMSNorm, a learned bias β per head and lag, SiLU, no biases.
    """

    def __init__(self, config: FlashNerdConfig, span: int) -> None:
        super().__init__()
        d, f = config.width, config.hidden
        self.span, self.heads, self.head_width = span, config.heads, d // config.heads
        self.sizes = [d, d, d, f, f]
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.project_in = nn.Linear(d, 3 * d + 2 * f, bias=False)
        self.project_out = nn.Linear(d + f, d, bias=False)
        self.lag_bias = nn.Parameter(torch.zeros(config.heads, span))
        nn.init.normal_(self.project_in.weight, std=d**-0.5)
        nn.init.normal_(self.project_out.weight, std=(d + f) ** -0.5 / (2 * len(config.spans)) ** 0.5)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, a, b = self.project_in(self.norm(x)).split(self.sizes, -1)
        shape = (self.heads, self.head_width)
        q = q.unflatten(-1, shape) * self.head_width**-0.5
        return q, k.unflatten(-1, shape), v.unflatten(-1, shape), F.silu(a) * b

    def forward(self, x: Tensor) -> Tensor:
        """Whole window: ``x`` of shape (B, T, d); time sample t attends to t-S+1 … t."""
        q, k, v, gated = self._project(x)
        steps = x.shape[1]
        # One shifted copy per lag: S is small, so this is cheaper than a (T, T) score matrix with a band.
        past_k = [F.pad(k, (0, 0, 0, 0, j, 0))[:, :steps] for j in range(self.span)]
        past_v = [F.pad(v, (0, 0, 0, 0, j, 0))[:, :steps] for j in range(self.span)]
        score = torch.stack([(q * p).sum(-1) for p in past_k], -1) + self.lag_bias  # (B, T, H, S)
        lag = torch.arange(self.span, device=x.device)
        seen = torch.arange(steps, device=x.device)[:, None] >= lag  # (T, S)
        weight = score.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        mixed = sum(weight[..., j, None] * past_v[j] for j in range(self.span))
        assert isinstance(mixed, Tensor)
        return x + self.project_out(torch.cat([mixed.flatten(-2), gated], -1))

    def step(
        self, x: Tensor, keys: Tensor, values: Tensor, valid: Tensor, cursor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One time sample: ``x`` of shape (B, d) and the ring, (B, S, H, D); returns the new ring too."""
        q, k, v, gated = self._project(x)
        slot = torch.arange(self.span, device=x.device)
        lag = torch.remainder(cursor - slot, self.span)  # 0 is the slot written now
        now = (lag == 0)[:, None, None]
        keys = torch.where(now, k[:, None].to(keys.dtype), keys)
        values = torch.where(now, v[:, None].to(values.dtype), values)
        score = (q[:, None] * keys).sum(-1) + self.lag_bias.T[lag]  # (B, S, H)
        score = torch.where((lag <= valid[:, None])[..., None], score, -torch.inf)
        weight = score.softmax(1)
        mixed = (weight[..., None] * values).sum(1)  # (B, H, D)
        x = x + self.project_out(torch.cat([mixed.flatten(-2).to(gated.dtype), gated], -1))
        return x, keys, values


class FlashNerd(nn.Module):
    """Streaming model of a robot's dynamics.

    ::

        x̄_t = [normalised token ; context features]
        h_t  = blocks(W_e x̄_t)
        y_t  = W_a x̄_t + c + MLP([RMSNorm(h_t) ; x̄_t])        normalised increment

    (W_a, c) start from ridge regression and the last layer of the MLP at zero, so training starts from the best
    affine model. With ``kinematic``, position channels of y are residuals of :meth:`StateCodec.drift`.

    Source: FlashNeRD Fig. 1. Chosen here: the sizes, the initialisation and its sharpness, the kinematic residual.

    Args:
        config: Sizes.
        robot: The robot; its codec gives tokens and increments.
        context_encoder: Maps a dict of named tensors with leading shape (..., ) to (..., out_size) features of the
            surroundings; must have ``out_size``. None for robots that touch nothing.
    """

    context_encoder: Any  # a module with out_size and observe, or None

    def __init__(self, config: FlashNerdConfig, robot: RobotSpec, context_encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.config, self.robot, self.codec = config, robot, StateCodec(robot)
        self.context_encoder = context_encoder
        context = int(getattr(context_encoder, "out_size", 0))
        frame, d, out = self.codec.token_size + context, config.width, self.codec.delta_size
        self.token_stats = Normalizer(self.codec.token_size)
        self.target_stats = Normalizer(out)
        self.embed = nn.Linear(frame, d)
        self.blocks = nn.ModuleList(Block(config, span) for span in config.spans)
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.affine = nn.Linear(frame, out)
        self.readout_in = nn.Linear(d + frame, config.readout_hidden)
        self.readout_out = nn.Linear(config.readout_hidden, out)
        for layer in (self.affine, self.readout_out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        if config.readout_sharpness:
            self._sharpen(config.readout_sharpness, frame)

    @torch.no_grad()
    def _sharpen(self, sharpness: float, frame: int) -> None:
        """Let the hidden units of the readout bend in many places of the frame, the outer ones included."""
        reach = sharpness * (3 / frame) ** 0.5  # so that F uniform weights on unit channels give this deviation
        self.readout_in.weight[:, self.config.width :].uniform_(-reach, reach)
        self.readout_in.bias.uniform_(-2 * sharpness, 2 * sharpness)

    def frame(self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None) -> Tensor:
        """Normalised frame x̄, shape (..., F), of states (..., nq + nv) and controls (..., nu)."""
        token = self.token_stats.normalize(self.codec.encode(state, control))
        if self.context_encoder is None:
            return token
        if context is None:
            raise ValueError("context is None, expected the tensors of this model's context encoder")
        return torch.cat([token, self.context_encoder(context).to(token.dtype)], -1)

    def _embed(self, frame: Tensor) -> Tensor:
        # Under autocast the blocks' products run in bfloat16; the residual stream does not.
        return self.embed(frame).to(frame.dtype)

    def _readout(self, h: Tensor, frame: Tensor) -> Tensor:
        # Increments are sums of large affine and small learned parts: never in bfloat16.
        with torch.autocast(frame.device.type, enabled=False):
            hidden = F.silu(self.readout_in(torch.cat([self.norm(h), frame], -1)))
            return self.affine(frame) + self.readout_out(hidden)

    def forward(self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None = None) -> Tensor:
        """Normalised targets for every time sample of a window.

        Args:
            state: True states, shape (B, T, nq + nv).
            control: Controls held from t to t + 1, shape (B, T, nu).
            context: Surroundings at each state, leading shape (B, T).

        Returns:
            Predictions of :meth:`target`, shape (B, T, 2·nv).
        """
        frame = self.frame(state, control, context)
        h = self._embed(frame)
        for block in self.blocks:
            h = block(h)
        return self._readout(h, frame)

    def target(self, state: Tensor, after: Tensor) -> Tensor:
        """What :meth:`forward` is trained to give for a pair of states, shape (..., 2·nv)."""
        return self.target_stats.normalize(self._residual(state, after))

    def _residual(self, state: Tensor, after: Tensor) -> Tensor:
        delta = self.codec.differentiate(after, state)
        return delta - self.codec.drift(state, delta) if self.config.kinematic else delta

    def increment(self, state: Tensor, y: Tensor) -> Tensor:
        """Physical increment, shape (..., 2·nv), of a normalised prediction ``y``."""
        delta = self.target_stats.denormalize(y)
        return delta + self.codec.drift(state, delta) if self.config.kinematic else delta

    def init_cache(self, n: int) -> KVCache:
        """Empty history for ``n`` worlds, on the device and in the type of the weights."""
        like = self.embed.weight
        shape = (self.config.heads, self.config.width // self.config.heads)
        rings = tuple(like.new_zeros(n, span, *shape) for span in self.config.spans)
        count = torch.zeros(n, dtype=torch.int64, device=like.device)
        cursor = torch.zeros((), dtype=torch.int64, device=like.device)
        return KVCache(rings, tuple(torch.zeros_like(r) for r in rings), count, cursor)

    def step(
        self,
        state: Tensor,
        control: Tensor,
        context: Mapping[str, Tensor] | None,
        cache: KVCache,
    ) -> tuple[Tensor, KVCache]:
        """Increment of one model step and the cache that now holds this time sample.

        Args:
            state: States, shape (B, nq + nv).
            control: Controls held over the step, shape (B, nu).
            context: Surroundings at the states, leading shape (B,).
            cache: History of the B worlds.

        Returns:
            Increment to give :meth:`StateCodec.integrate`, shape (B, 2·nv), and the new cache.
        """
        frame = self.frame(state, control, context)
        h = self._embed(frame)
        keys, values = [], []
        for block, k, v in zip(self.blocks, cache.keys, cache.values, strict=True):
            assert isinstance(block, Block)
            h, k, v = block.step(h, k, v, cache.valid, cache.cursor)
            keys.append(k)
            values.append(v)
        after = KVCache(tuple(keys), tuple(values), cache.valid + 1, cache.cursor + 1)
        return self.increment(state, self._readout(h, frame).to(state.dtype)), after

    @torch.no_grad()
    def fit(self, state: Tensor, control: Tensor, after: Tensor, ridge: float = 1e-6, total: Total = alone) -> None:
        """Freeze the normalisers and start the affine path from ridge regression.

        Args:
            state: Sample of training states, shape (N, nq + nv).
            control: Controls, shape (N, nu).
            after: The states one model step later, shape (N, nq + nv).
            ridge: Penalty on the weights per sample, in normalised units.
            total: Sums over the processes that hold a part of the sample each.
        """
        self.token_stats.fit(self.codec.encode(state, control), total)
        self.target_stats.fit(self._residual(state, after), total)
        x = self.token_stats.normalize(self.codec.encode(state, control)).double()
        y = self.target(state, after).double()
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        count = total(x.new_tensor(float(len(x))))
        gram = total(x.T @ x) / count + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        solution = torch.linalg.solve(gram, total(x.T @ y) / count)
        self.affine.weight[:, : self.codec.token_size] = solution[:-1].T.to(self.affine.weight)
        self.affine.bias.copy_(solution[-1])

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self.parameters())
