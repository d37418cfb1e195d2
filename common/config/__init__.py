"""Configuration of a run: one YAML file, overridden by the environment and by `-o key=value`."""

from common.config.agent import AgentConfig
from common.config.algorithm import AlgorithmConfig
from common.config.correction import AGE_BUCKETS, CorrectionConfig, SkyRLCorrection
from common.config.critic import CriticConfig
from common.config.data import DataConfig, DataSource, Source
from common.config.generator import EpisodeConfig, GeneratorConfig, SandboxConfig
from common.config.learner import Deltas, LearnerConfig, LoraConfig, WeightsConfig
from common.config.load import changed_config, load_config, parse_config
from common.config.run import BrokerConfig, Config, ModelConfig, RunConfig
from common.config.sampler import (
    AdvantageConfig,
    DriftConfig,
    EvalConfig,
    RunTrackerConfig,
    SamplerConfig,
    SelectionConfig,
    TrackerConfig,
)
from common.config.sft import SftConfig
from common.config.shared import Difference, differences, dump_config, shared_values
from common.config.teacher import TeacherConfig

__all__ = [
    "AGE_BUCKETS", "AdvantageConfig", "AgentConfig", "AlgorithmConfig", "BrokerConfig", "Config",
    "CorrectionConfig", "CriticConfig", "DataConfig", "DataSource", "Deltas", "Difference", "DriftConfig",
    "EpisodeConfig", "EvalConfig", "GeneratorConfig", "LearnerConfig", "LoraConfig", "ModelConfig", "RunConfig",
    "RunTrackerConfig", "SamplerConfig", "SandboxConfig", "SelectionConfig", "SftConfig", "SkyRLCorrection", "Source",
    "TeacherConfig", "TrackerConfig", "WeightsConfig", "changed_config", "differences", "dump_config", "load_config",
    "parse_config", "shared_values",
]  # fmt: skip
