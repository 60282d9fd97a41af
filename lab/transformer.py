"""The shape of a transformer's training step, its name and its FLOP."""

from __future__ import annotations

from dataclasses import asdict, dataclass

FAMILIES = ("bert", "gpt2", "xlnet")
_LETTERS = "ldhfvsb"


@dataclass(frozen=True)
class TransformerShape:
    """A model of one of the families and the batch of one rank.

    Args:
        family: bert, gpt2 or xlnet.
        width: of the hidden states; a multiple of ``heads``.
        inner: width inside the feed-forward part.
        sequence: tokens of a sample.
        batch: samples of one rank in a step.
    """

    family: str
    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    sequence: int
    batch: int

    @property
    def name(self) -> str:
        """Such as ``bert-l4-d256-h4-f1024-v2000-s128-b8``."""
        sizes = list(asdict(self).values())[1:]
        parts = (f"{letter}{size}" for letter, size in zip(_LETTERS, sizes, strict=True))
        return "-".join([self.family, *parts])

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return self.sequence * self.batch

    @property
    def flop(self) -> float:
        """Of one step: three times the forward's matrix products (Kaplan et al. 2020, eq. 2.1).

        A layer multiplies by ``4 d^2 + 2 d f`` weights a token and attends to the sequence twice;
        XLNet also projects and attends to ``2 s`` relative positions.
        """
        weights = 4 * self.width**2 + 2 * self.width * self.inner
        attended = 2 * self.sequence * self.width
        if self.family == "xlnet":
            weights += 2 * self.width**2
            attended += 2 * self.sequence * self.width
        a_token = self.layers * (weights + attended) + self.width * self.vocabulary
        return 6.0 * a_token * self.tokens


def parse_shape(name: str) -> TransformerShape:
    """The shape that a name stands for.

    Raises:
        ValueError: it is not such a name.
    """
    family, *parts = name.split("-")
    if family not in FAMILIES or [part[:1] for part in parts] != list(_LETTERS):
        raise ValueError(
            f"'{name}' is not the name of a transformer; names look like "
            "bert-l4-d256-h4-f1024-v2000-s128-b8"
        )
    return TransformerShape(family, *(int(part[1:]) for part in parts))
