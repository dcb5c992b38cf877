"""The run config: its sections, how it is loaded and explained, and the settings in effect at each step."""

from z2all_ds.base.config.run_config import (
    RunConfig,
    anchored,
    dump_model_yaml,
    dump_yaml,
    load_run_config,
    merge_nested,
)

__all__ = ["RunConfig", "anchored", "dump_model_yaml", "dump_yaml", "load_run_config", "merge_nested"]
