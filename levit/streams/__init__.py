"""Data sets and the streams made of them."""

from levit.streams.datasets import DataError, Dataset, default_data_dir, load_dataset
from levit.streams.split import SplitStream

__all__ = ["DataError", "Dataset", "SplitStream", "default_data_dir", "load_dataset"]
