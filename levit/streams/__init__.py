"""Data sets and the streams made of them."""

from levit.streams.dataset import DataError, Dataset
from levit.streams.datasets import configured_dataset, default_data_dir, load_dataset
from levit.streams.stream import Images, Stream, TestSet

__all__ = [
    "DataError",
    "Dataset",
    "Images",
    "Stream",
    "TestSet",
    "configured_dataset",
    "default_data_dir",
    "load_dataset",
]
