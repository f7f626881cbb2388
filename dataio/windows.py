"""Windows over the low-dimensional columns, cut at load time: action chunks of any length, histories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dataio.manifest import DataError
from dataio.reader import ShardReader


class Windows:
    """For each sample, the rows of its episode at given distances in frames.

    `deltas` maps a column's LeRobot key to integer distances, negative ones looking back; for LeRobot's
    `delta_timestamps` d, that is round(d · fps). Where a window leaves its episode, the episode's first or
    last row is repeated and `is_pad` is True, as in LeRobotDataset. Works for any order of the samples.
    """

    def __init__(self, reader: ShardReader, deltas: Mapping[str, Sequence[int]]):
        """Raises DataError for an unknown column, distances that are no integers, incomplete episodes."""
        self._columns = reader.columns
        self._deltas = {}
        for key, distances in deltas.items():
            reader.manifest.column(key)
            array = np.asarray(distances)
            if array.ndim != 1 or not array.size or array.dtype.kind != "i":
                raise DataError(
                    f"window over {key!r}: give a list of whole frame distances, got {distances!r}"
                )
            self._deltas[key] = array.astype(np.int64)
        self._lay_out_episodes(reader)

    def gather(self, samples: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The rows of `samples` (ids, int64 [B]), T = number of distances.

        Returns ({key: [B, *shape], or [B, T, *shape] where windowed}, {windowed key: pads, bool [B, T]}).
        """
        place = self._place[samples]
        first, last = self._first[place], self._last[place]
        columns, is_pad = {}, {}
        for key, column in self._columns.items():
            if key not in self._deltas:
                columns[key] = column[samples]
                continue
            wanted = place[:, None] + self._deltas[key]
            inside = np.clip(wanted, first[:, None], last[:, None])
            columns[key] = column[self._sample[inside]]
            is_pad[key] = wanted != inside
        return columns, is_pad

    def _lay_out_episodes(self, reader: ShardReader) -> None:
        """Places number the samples by (episode, frame); each lies in its episode's places [first, last]."""
        self._sample = np.lexsort((reader.frame, reader.episode))
        self._place = np.empty_like(self._sample)
        self._place[self._sample] = np.arange(len(reader))
        numbers, starts, lengths = np.unique(
            reader.episode[self._sample], return_index=True, return_counts=True
        )
        self._first = np.repeat(starts, lengths)
        self._last = self._first + np.repeat(lengths, lengths) - 1
        found = dict(zip(numbers.tolist(), lengths.tolist(), strict=True))
        listed = {episode.episode: episode.length for episode in reader.manifest.episodes}
        frames = reader.frame[self._sample] - (np.arange(len(reader)) - self._first)
        wrong = {episode for episode, _ in found.items() ^ listed.items()}
        wrong |= set(reader.episode[self._sample][frames != 0].tolist())
        if wrong:
            raise DataError(
                f"{reader.directory}: episode {min(wrong)} is not whole: its frames are not 0 … length − 1 "
                "as the manifest lists it, and windows over it would be wrong. Shard the dataset again."
            )
