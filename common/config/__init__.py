"""Configuration of a run: one YAML file, overridden by the environment and by `-o key=value`."""

from common.config.algorithm import AlgorithmConfig
from common.config.correction import AGE_BUCKETS, CorrectionConfig
from common.config.data import DataConfig, DataSource, Source
from common.config.episode import EpisodeConfig
from common.config.generator import GeneratorConfig
from common.config.load import Difference, differences, dump_config, load_config, parse_config, shared_values
from common.config.lora import LoraConfig
from common.config.sections import (
    AdvantageConfig,
    BrokerConfig,
    Config,
    Criterion,
    Deltas,
    DriftConfig,
    EvalConfig,
    LearnerConfig,
    ModelConfig,
    RunConfig,
    RunTrackerConfig,
    SamplerConfig,
    SandboxConfig,
    SelectionConfig,
    TrackerConfig,
    WeightsConfig,
)
from common.config.skyrl import SkyRLCorrection

__all__ = [
    "AGE_BUCKETS",
    "AdvantageConfig",
    "AlgorithmConfig",
    "BrokerConfig",
    "Config",
    "CorrectionConfig",
    "Criterion",
    "DataConfig",
    "DataSource",
    "Deltas",
    "Difference",
    "DriftConfig",
    "EpisodeConfig",
    "EvalConfig",
    "GeneratorConfig",
    "LearnerConfig",
    "LoraConfig",
    "ModelConfig",
    "RunConfig",
    "RunTrackerConfig",
    "SamplerConfig",
    "SandboxConfig",
    "SelectionConfig",
    "SkyRLCorrection",
    "Source",
    "TrackerConfig",
    "WeightsConfig",
    "differences",
    "dump_config",
    "load_config",
    "parse_config",
    "shared_values",
]
