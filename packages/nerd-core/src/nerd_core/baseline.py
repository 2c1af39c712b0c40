"""NerdBaseline: the windowed transformer of NeRD, the opponent that FlashNerd is measured against.

It has the public face of :class:`FlashNerd`, so losses, rollouts, evaluation and artifacts take either. Positions are
absolute, so a frame's keys and values change whenever the window moves on: every step encodes the window anew.
``step`` is the optimized form, :class:`PlainNerd` the direct one; docs/baseline.md says what was done and why it is
allowed.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .codec import StateCodec
from .normalizer import Normalizer, Total, alone
from .robot import RobotSpec

__all__ = ["NerdBaseline", "NerdBaselineConfig", "NerdTransformer", "PlainNerd", "WindowCache"]

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class NerdBaselineConfig:
    """Sizes of a :class:`NerdBaseline`; the defaults are NeRD's for CartPole.

    Attributes:
        width: Model width d.
        heads: Attention heads H; d must be a multiple.
        layers: Blocks L.
        window: Frames that a prediction can see, the current one included.
        block: Learned absolute positions; those from ``window`` on are never used, but count as parameters.
        head_hidden: Width of the head's hidden layer.
    """

    width: int = 192
    heads: int = 12
    layers: int = 6
    window: int = 10
    block: int = 32
    head_hidden: int = 64

    def __post_init__(self) -> None:
        for name in ("width", "heads", "layers", "window", "block", "head_hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}, expected a multiple of heads ({self.heads})")
        if self.window > self.block:
            raise ValueError(f"window is {self.window}, expected at most block ({self.block})")

    @property
    def receptive_field(self) -> int:
        """Frames that can influence a prediction: the window."""
        return self.window


class WindowCache(NamedTuple):
    """The frames of the window, oldest first, as the network reads them.

    A value: passed in and returned, never stored in a module. A row that has seen n frames since its reset holds them
    in slots 0 … n-1, the positions that they have in a training window; a full row is shifted by one.

    Attributes:
        frames: Normalised frames, shape (B, W, F); unused slots are zero.
        valid: Frames seen since the row's last reset, shape (B,), int64.
    """

    frames: Tensor
    valid: Tensor

    def reset(self, mask: Tensor) -> "WindowCache":
        """Forget the history of the rows where ``mask``, shape (B,), is true; other rows are untouched.

        The slots are zeroed too: a masked weight is 0, but 0 · NaN is NaN.
        """
        return WindowCache(
            torch.where(mask[:, None, None], torch.zeros_like(self.frames), self.frames),
            torch.where(mask, torch.zeros_like(self.valid), self.valid),
        )

    def expand(self, n: int) -> "WindowCache":
        """Fork a history of one row into ``n`` rows."""
        if self.valid.shape[0] != 1:
            raise ValueError(f"cache has {self.valid.shape[0]} rows, expected 1 to expand")
        return WindowCache(self.frames.expand(n, -1, -1).contiguous(), self.valid.expand(n).contiguous())

    def push(self, frame: Tensor) -> "WindowCache":
        """The cache after a new frame, shape (B, F); its slot is ``min(valid, W - 1)`` of the old cache."""
        window, frame = self.frames.shape[1], frame[:, None].to(self.frames.dtype)
        shifted = torch.cat([self.frames[:, 1:], frame], 1)
        slot = torch.arange(window, device=frame.device)
        filling = torch.where((slot == self.valid[:, None])[..., None], frame, self.frames)
        full = (self.valid >= window)[:, None, None]
        return WindowCache(torch.where(full, shifted, filling), self.valid + 1)

    def shift(self, frame: Tensor) -> "WindowCache":
        """:meth:`push` for rows that are all full: no choice per row."""
        frame = frame[:, None].to(self.frames.dtype)
        return WindowCache(torch.cat([self.frames[:, 1:], frame], 1), self.valid + 1)


class NerdBlock(nn.Module):
    """Pre-norm block of GPT-2 without biases: attention, then a feedforward of four times the width.

    ::

        x ← x + Attention(LN(x)) W_o;   x ← x + GELU(LN(x) W_1) W_2

    Source: NeRD Table 2 and its public code.
    """

    def __init__(self, config: NerdBaselineConfig) -> None:
        super().__init__()
        d = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(d, bias=False)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.attention_out = nn.Linear(d, d, bias=False)
        self.feedforward_norm = nn.LayerNorm(d, bias=False)
        self.feedforward_in = nn.Linear(d, 4 * d, bias=False)
        self.feedforward_out = nn.Linear(4 * d, d, bias=False)
        residual = INIT_STD / (2 * config.layers) ** 0.5
        for layer in (self.qkv, self.feedforward_in):
            nn.init.normal_(layer.weight, std=INIT_STD)
        for layer in (self.attention_out, self.feedforward_out):
            nn.init.normal_(layer.weight, std=residual)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)  # (B, T, d) → (B, H, T, D)

    def _feedforward(self, x: Tensor) -> Tensor:
        return x + self.feedforward_out(F.gelu(self.feedforward_in(self.feedforward_norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        """Whole window: ``x`` of shape (B, T, d); position t attends to 0 … t."""
        q, k, v = map(self._heads, self.qkv(self.attention_norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(-3, -2).flatten(-2))
        return self._feedforward(x)

    def newest(self, x: Tensor, slot: Tensor | None) -> Tensor:
        """One row of :meth:`forward`, shape (B, d): position ``slot``, shape (B,), or the last one if None."""
        u = self.attention_norm(x)
        q_weight, kv_weight = self.qkv.weight.split([x.shape[-1], 2 * x.shape[-1]])
        k, v = map(self._heads, F.linear(u, kv_weight).chunk(2, -1))
        q = self._heads(F.linear(_row(u, slot), q_weight)[:, None])
        seen = None
        if slot is not None:
            seen = (torch.arange(x.shape[1], device=x.device) <= slot[:, None])[:, None, None]  # (B, 1, 1, T)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self._feedforward(_row(x, slot) + self.attention_out(mixed.flatten(1)))


def _row(x: Tensor, slot: Tensor | None) -> Tensor:
    """Rows ``slot`` of (B, T, d), or the last ones."""
    if slot is None:
        return x[:, -1]
    return x.gather(1, slot[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0]


class NerdTransformer(nn.Module):
    """NeRD's network, apart from any codec: normalised frames in, normalised increments out.

    ::

        h = blocks(x W_e + b_e + p_t);   y = W_b ReLU(W_a W_p LN(h) + b_a) + b_b

    Source: NeRD Table 2 and its public code, which starts weights at N(0, 0.02), projections into the residual stream
    at N(0, 0.02 / √(2 L)), and the two layers with biases of the head as PyTorch does.

    Args:
        config: Sizes.
        inputs: Width of a frame.
        outputs: Width of an increment.
    """

    project: nn.Module

    def __init__(self, config: NerdBaselineConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        d = config.width
        self.embed = nn.Linear(inputs, d)
        self.position = nn.Parameter(torch.empty(config.block, d))
        self.blocks = nn.ModuleList(NerdBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(d, bias=False)
        self.project = nn.Linear(d, d, bias=False)
        self.head_in = nn.Linear(d, config.head_hidden)
        self.head_out = nn.Linear(config.head_hidden, outputs)
        for weight in (self.embed.weight, self.position, self.project.weight):
            nn.init.normal_(weight, std=INIT_STD)
        nn.init.zeros_(self.embed.bias)

    def _embed(self, frames: Tensor) -> Tensor:
        # Under autocast the blocks' products run in bfloat16; the residual stream does not.
        return self.embed(frames).to(frames.dtype) + self.position[: frames.shape[1]]

    def _readout(self, h: Tensor) -> Tensor:
        with torch.autocast(h.device.type, enabled=False):
            return self.head_out(F.relu(self.head_in(self.project(self.norm(h)))))

    def forward(self, frames: Tensor) -> Tensor:
        """Increments, shape (B, T, outputs), after each of the frames, shape (B, T, inputs)."""
        h = self._embed(frames)
        for block in self.blocks:
            h = block(h)
        return self._readout(h)

    def newest(self, frames: Tensor, slot: Tensor | None) -> Tensor:
        """One row of :meth:`forward`, shape (B, outputs): position ``slot``, shape (B,), or the last one if None.

        Frames after ``slot`` do not matter, attention being causal. Of the last block only keys and values are
        computed for every frame.
        """
        h = self._embed(frames)
        *before, last = self.blocks
        for block in before:
            h = block(h)
        assert isinstance(last, NerdBlock)
        return self._readout(last.newest(h, slot))


class NerdBaseline(nn.Module):
    """NeRD's network behind the codec, the normalisers and the public face of :class:`FlashNerd`.

    No kinematic residual, no affine path, no use of the structure of time: a prediction is the network's output at
    the newest of the last W frames, and every window starts at position 0.

    Source: NeRD Sec. 3, Table 2. Chosen here: our codec and normalisers, so that only the network differs.

    Args:
        config: Sizes.
        robot: The robot; its codec gives tokens and increments.
        context_encoder: As :class:`FlashNerd` takes it.
    """

    context_encoder: Any  # a module with out_size and observe, or None

    def __init__(self, config: NerdBaselineConfig, robot: RobotSpec, context_encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.config, self.robot, self.codec = config, robot, StateCodec(robot)
        self.context_encoder = context_encoder
        self.frame_size = self.codec.token_size + int(getattr(context_encoder, "out_size", 0))
        self.token_stats = Normalizer(self.codec.token_size)
        self.target_stats = Normalizer(self.codec.delta_size)
        self.network = NerdTransformer(config, self.frame_size, self.codec.delta_size)

    def frame(self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None) -> Tensor:
        """Normalised frame, shape (..., F), of states (..., nq + nv) and controls (..., nu)."""
        token = self.token_stats.normalize(self.codec.encode(state, control))
        if self.context_encoder is None:
            return token
        if context is None:
            raise ValueError("context is None, expected the tensors of this model's context encoder")
        return torch.cat([token, self.context_encoder(context).to(token.dtype)], -1)

    def forward(self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None = None) -> Tensor:
        """Normalised targets for every frame of a window.

        Args:
            state: True states, shape (B, T, nq + nv).
            control: Controls held from t to t + 1, shape (B, T, nu).
            context: Surroundings at each state, leading shape (B, T).

        Returns:
            Predictions of :meth:`target`, shape (B, T, 2·nv).

        Raises:
            ValueError: T is more than the window.
        """
        if state.shape[1] > self.config.window:
            raise ValueError(
                f"state: window of {state.shape[1]} frames, expected at most {self.config.window}, "
                "the frames that a nerd-baseline can see"
            )
        return self.network(self.frame(state, control, context))

    def target(self, state: Tensor, after: Tensor) -> Tensor:
        """What :meth:`forward` is trained to give for a pair of states, shape (..., 2·nv)."""
        return self.target_stats.normalize(self.codec.differentiate(after, state))

    def increment(self, state: Tensor, y: Tensor) -> Tensor:
        """Physical increment, shape (..., 2·nv), of a normalised prediction ``y``; the state plays no part."""
        del state
        return self.target_stats.denormalize(y)

    def init_cache(self, n: int) -> WindowCache:
        """Empty history for ``n`` worlds, on the device and in the type of the weights."""
        like = self.network.embed.weight
        return WindowCache(
            like.new_zeros(n, self.config.window, self.frame_size),
            torch.zeros(n, dtype=torch.int64, device=like.device),
        )

    def step(
        self,
        state: Tensor,
        control: Tensor,
        context: Mapping[str, Tensor] | None,
        cache: WindowCache,
        *,
        full: bool = False,
    ) -> tuple[Tensor, WindowCache]:
        """Increment of one model step and the cache that now holds this frame.

        Args:
            state: States, shape (B, nq + nv).
            control: Controls held over the step, shape (B, nu).
            context: Surroundings at the states, leading shape (B,).
            cache: History of the B worlds.
            full: The caller's word that every row has seen at least W frames: leaves out what only shorter histories
                need. Not checked.

        Returns:
            Increment to give :meth:`StateCodec.integrate`, shape (B, 2·nv), and the new cache.
        """
        frame = self.frame(state, control, context)
        if full:
            slot, cache = None, cache.shift(frame)
        else:
            slot, cache = cache.valid.clamp(max=self.config.window - 1), cache.push(frame)
        return self.increment(state, self.network.newest(cache.frames, slot).to(state.dtype)), cache

    @torch.no_grad()
    def fit(self, state: Tensor, control: Tensor, after: Tensor, ridge: float = 1e-6, total: Total = alone) -> None:
        """Freeze the normalisers; there is no affine path to start, so ``ridge`` is not used.

        Args:
            state: Sample of training states, shape (N, nq + nv).
            control: Controls, shape (N, nu).
            after: The states one model step later, shape (N, nq + nv).
            ridge: Accepted so that either model can be fitted by the same call.
            total: Sums over the processes that hold a part of the sample each.
        """
        del ridge
        self.token_stats.fit(self.codec.encode(state, control), total)
        self.target_stats.fit(self.codec.differentiate(after, state), total)

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self.parameters())

    @property
    def is_folded(self) -> bool:
        """Whether this is a copy made by :meth:`folded`."""
        return isinstance(self.network.project, nn.Identity)

    @torch.no_grad()
    def folded(self) -> "NerdBaseline":
        """A copy for inference: the same function, products of constants taken beforehand. It cannot be saved.

        W_p is multiplied into the head, the gains of the norms into the weights that follow, the bias of the
        embedding into the positions.
        """
        copied = copy.deepcopy(self).eval().requires_grad_(False)
        net, project = copied.network, copied.network.project
        if isinstance(project, nn.Linear):
            net.head_in.weight.copy_(net.head_in.weight.double() @ project.weight.double())
            net.project = nn.Identity()
            _absorb(net.norm, net.head_in)
            for block in net.blocks:
                assert isinstance(block, NerdBlock)
                _absorb(block.attention_norm, block.qkv)
                _absorb(block.feedforward_norm, block.feedforward_in)
            net.position.add_(net.embed.bias)
            net.embed.bias = None  # type: ignore[assignment]
        return copied


def _absorb(norm: nn.LayerNorm, layer: nn.Linear) -> None:
    layer.weight.mul_(norm.weight)
    norm.weight = None  # type: ignore[assignment]


class PlainNerd(nn.Module):
    """The step without any thought for speed: the whole window encoded anew, one of its outputs used.

    The yardstick of :meth:`NerdBaseline.step`, a :class:`StreamingStep` with the same cache.

    Args:
        model: The model to run.
    """

    def __init__(self, model: NerdBaseline) -> None:
        super().__init__()
        self.model, self.robot = model, model.robot

    def init_cache(self, n: int) -> WindowCache:
        """Empty history for ``n`` worlds."""
        return self.model.init_cache(n)

    def step(
        self, state: Tensor, control: Tensor, context: Mapping[str, Tensor] | None, cache: WindowCache
    ) -> tuple[Tensor, WindowCache]:
        """What :meth:`NerdBaseline.step` gives."""
        model = self.model
        slot = cache.valid.clamp(max=model.config.window - 1)
        cache = cache.push(model.frame(state, control, context))
        return model.increment(state, _row(model.network(cache.frames), slot).to(state.dtype)), cache
