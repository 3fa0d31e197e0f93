"""What layers keep of a sequence in place of keys and values, or beside them, at its slot of the batch table."""

from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """A gated delta net; dimensions are those of one head. Each key head serves as many value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int  # tokens that the convolution sees, the last one included
    is_tiled: bool = False  # the value heads of a key head are num_key_heads apart; else side by side
    has_bias: ClassVar[bool] = False  # of its projections

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.output_dim

    @property
    def output_dim(self) -> int:
        """Numbers that it returns for a token; as many as it has gates."""
        return self.num_value_heads * self.value_dim

    @property
    def projected_dim(self) -> int:
        """Numbers that it takes for a token: queries, keys, values, gates, then b and a of each value head."""
        return self.conv_dim + self.output_dim + 2 * self.num_value_heads

    @property
    def recurrent_shape(self) -> tuple[int, ...]:
        """Shape of what a sequence keeps besides the last inputs of the convolution."""
        return self.num_value_heads, self.key_dim, self.value_dim

    def shared_by(self, num_ranks: int) -> "DeltaNetConfig":
        """Return the part of a rank: value heads go with the key head that serves them."""
        num_key_heads, num_value_heads = self.num_key_heads // num_ranks, self.num_value_heads // num_ranks
        return replace(self, num_key_heads=num_key_heads, num_value_heads=num_value_heads)

    @property
    def state_bytes(self) -> int:
        """Size of the state of a sequence, in float32."""
        return 4 * ((self.conv_size - 1) * self.conv_dim + self.output_dim * self.key_dim)


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """A short convolution: c * convolution(b * x), each of b, c and x a number a channel."""

    size: int  # channels
    conv_size: int  # tokens that the convolution sees, the last one included
    has_bias: bool  # the convolution and the projections around it

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution."""
        return self.size

    @property
    def output_dim(self) -> int:
        """Numbers that it returns for a token."""
        return self.size

    @property
    def projected_dim(self) -> int:
        """Numbers that it takes for a token: b, c and x."""
        return 3 * self.size

    @property
    def recurrent_shape(self) -> tuple[int, ...]:
        """Shape of what a sequence keeps besides the last inputs of the convolution: nothing."""
        return (0,)

    def shared_by(self, num_ranks: int) -> "ShortConvConfig":
        """Return the part of a rank."""
        return replace(self, size=self.size // num_ranks)

    @property
    def state_bytes(self) -> int:
        """Size of the state of a sequence, in float32."""
        return 4 * (self.conv_size - 1) * self.size


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """A Mamba-2 layer; dimensions are those of one head. The heads of a group share B and C and are normed together."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int
    conv_size: int  # tokens that the convolution sees, the last one included
    has_conv_bias: bool
    has_bias: bool  # the projections around it
    num_norm_ranks: int = 1  # ranks that have heads of the same group

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.output_dim + 2 * self.num_groups * self.state_size

    @property
    def output_dim(self) -> int:
        """Numbers that it returns for a token; as many as it has gates."""
        return self.num_heads * self.head_dim

    @property
    def projected_dim(self) -> int:
        """Numbers that it takes for a token: x, B, C, gates, then dt of each head."""
        return self.conv_dim + self.output_dim + self.num_heads

    @property
    def recurrent_shape(self) -> tuple[int, ...]:
        """Shape of what a sequence keeps besides the last inputs of the convolution."""
        return self.num_heads, self.state_size, self.head_dim

    def shared_by(self, num_ranks: int) -> "Mamba2Config":
        """Return the part of a rank; all ranks have a single group."""
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_groups=max(1, self.num_groups // num_ranks),
            num_norm_ranks=num_ranks if self.num_groups == 1 else 1,
        )

    @property
    def state_bytes(self) -> int:
        """Size of the state of a sequence, in float32."""
        return 4 * ((self.conv_size - 1) * self.conv_dim + self.output_dim * self.state_size)


# What a layer may have in place of attention.
StateConfig = DeltaNetConfig | ShortConvConfig | Mamba2Config


@dataclass(frozen=True, slots=True)
class LastHiddenConfig:
    """The normed hidden state of the last token of a sequence, which a head that drafts goes on from."""

    size: int
    conv_size: ClassVar[int] = 2  # it is kept as the last input of a convolution over two tokens
    projected_dim: ClassVar[int] = 0

    @property
    def conv_dim(self) -> int:
        """Numbers that are kept."""
        return self.size

    @property
    def recurrent_shape(self) -> tuple[int, ...]:
        """Shape of what a sequence keeps besides: nothing."""
        return (0,)

    @property
    def state_bytes(self) -> int:
        """Size of it, in float32."""
        return 4 * self.size


# What a sequence keeps at its slot.
SlotState = StateConfig | LastHiddenConfig
