"""The places of drawn rows, for libraries that name rows by place: they remember which rows were there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Indexes(np.ndarray[Any, np.dtype[np.int64]]):
    """Slots of transitions, int64 `[n]`, with the keys of the rows that were drawn there.

    Slots are used again, keys never. So feedback for rows that have been overwritten since is dropped.
    Parts (`indexes[mask]`), copies, casts to other integers and pickles keep the keys. Plain numbers have none.
    """

    keys: NDArray[np.int64] | None = None
    drawn: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, slots: NDArray[np.int64], keys: NDArray[np.int64]) -> Indexes:
        """Returns `slots` that remember `keys`."""
        made = slots.view(cls)
        made.keys, made.drawn = keys, slots.copy()
        return made

    def intact_keys(self) -> NDArray[np.int64] | None:
        """Returns the keys, `[n]`; None where there are none, or the numbers were changed in place."""
        if self.keys is None or self.drawn is None or not np.array_equal(self.drawn, self.view(np.ndarray)):
            return None
        return self.keys.ravel()

    def _with_keys(self, made: Any, of: Callable[[NDArray[Any]], Any]) -> Any:
        """Gives `made`, a part or another form of this array, the keys that `of` takes."""
        if isinstance(made, Indexes) and self.keys is not None and self.drawn is not None:
            made.keys, made.drawn = of(self.keys), of(self.drawn)
        return made

    def __getitem__(self, which: Any) -> Any:
        return self._with_keys(super().__getitem__(which), lambda values: values[which])

    def copy(self, order: Any = "C") -> Any:
        """Returns a copy, which has the keys too."""
        return self._with_keys(super().copy(order), lambda values: values)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns them in another dtype, with the keys."""
        return self._with_keys(super().astype(dtype, *args, **kwargs), lambda values: values)

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """Returns them in another shape, with the keys."""
        return self._with_keys(super().reshape(*shape, **kwargs), lambda values: values.reshape(*shape, **kwargs))

    def ravel(self, order: Any = "C") -> Any:
        """Returns them in one dimension, with the keys."""
        return self._with_keys(super().ravel(order), lambda values: values.ravel(order))

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        keys = self.intact_keys()
        plain = np.array(self)
        return (np.array, (plain,)) if keys is None else (Indexes.of, (plain, keys.reshape(plain.shape)))
