"""The dense part as times and sizes measured on the user's own job, in place of its ops."""

from __future__ import annotations

from dataclasses import dataclass, replace

from predictor.errors import InputError


@dataclass(frozen=True)
class MeasuredDense:
    """What one rank's dense part took, without lookups and collectives.

    Args:
        batch_size: samples of the rank when it was measured, >= 1.
        forward_ms, backward_ms, optimizer_ms: time of its kernels, >= 0.
        gradient_bytes: of all dense gradients that are all-reduced, >= 0; the parameters are taken
            to be as large.
        activation_bytes: most that the forward leaves for the backward; None if it was not
            measured.
        optimizer: of the dense parameters and of data-parallel tables.
        bucket_cap_mb: as in `DenseArch`.
        in_features: dense inputs of a sample, which are copied to the device.
    """

    batch_size: int
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    gradient_bytes: int
    activation_bytes: int | None = None
    optimizer: str = "sgd"
    bucket_cap_mb: float = 25.0
    in_features: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(
                f"measured dense times are of a batch of {self.batch_size}; it must be at least 1"
            )

    def at_batch_size(self, batch_size: int) -> MeasuredDense:
        """Forward, backward and activations in proportion to the samples; parameters stay.

        An extrapolation: small kernels, whose time does not fall with the batch, are not known.
        """
        share = batch_size / self.batch_size
        activations = self.activation_bytes
        return replace(
            self,
            batch_size=batch_size,
            forward_ms=self.forward_ms * share,
            backward_ms=self.backward_ms * share,
            activation_bytes=None if activations is None else round(activations * share),
        )
