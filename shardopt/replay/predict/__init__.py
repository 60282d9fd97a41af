"""Laws of the calls of benchmarks, fitted on replays."""
