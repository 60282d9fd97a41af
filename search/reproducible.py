"""CP-SAT such that its answers do not depend on the machine, and Ctrl-C ends it at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

from ortools.sat.python import cp_model


def reproducible_solver(work: float, seed: int, time_limit_s: float) -> cp_model.CpSolver:
    """A solver that gives the same answer on any machine unless the wall-time ceiling cuts it.

    Args:
        work: deterministic time of CP-SAT, about seconds on one core.
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = work
    solver.parameters.catch_sigint_signal = False  # `run` stops it and lets Python raise
    if time_limit_s < float("inf"):
        solver.parameters.max_time_in_seconds = max(0.1, time_limit_s)
    return solver


def run(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """Solve such that Ctrl-C ends it at once.

    Python handles signals between two instructions of the main thread, so the main thread must
    not sit in the solver: it waits for a thread that does.
    """
    with ThreadPoolExecutor(1) as pool:
        status = pool.submit(solver.solve, model)
        try:
            return status.result()
        except BaseException:
            while not status.done():  # a stop that comes before the search has begun is lost
                solver.stop_search()
                wait([status], timeout=0.05)
            raise
