import io
import multiprocessing
import threading
import time

from tqdm import tqdm


def hold_the_lock_of_progress_bars(held):
    tqdm.get_lock().acquire()
    held.set()
    time.sleep(60)


def test_a_forked_child_that_is_killed_leaves_progress_bars_unlocked():
    """Compilers draw bars: a test that kills its ranks would let a later one wait for ever."""
    fork = multiprocessing.get_context("fork")
    held = fork.Event()
    child = fork.Process(target=hold_the_lock_of_progress_bars, args=(held,))
    child.start()
    assert held.wait(20)
    child.kill()
    child.join()
    bar = threading.Thread(target=lambda: tqdm(disable=False, file=io.StringIO()).close(), daemon=True)
    bar.start()
    bar.join(5)
    assert not bar.is_alive()
    assert tqdm.monitor_interval == 0
