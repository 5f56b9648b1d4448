"""
A limit of seconds for functions of the user's: rewards and environments. They run in the main
thread, because Python hears signals in no other: re.fullmatch("(a+)+b", "a" * 60) lets no thread
of Python run for years, but it looks for signals.
"""
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback

import torch

from options.failures import place_of

HERE = os.path.dirname(os.path.abspath(__file__))
# seconds behind the limit: then the process ends, because the function has not looked for signals,
# as in one long multiplication; or because it caught all that was raised
LAST_RESORT = 10


class Late(BaseException):
    """The seconds are over; str: " at FILE, line N". No `except Exception` catches it."""


def in_time(seconds, function, *arguments):
    """
    function(*arguments); raises Late where it takes more than `seconds`; None: it may take for
    ever. Whatever it sets for its thread, such as torch.set_grad_enabled(False), ends with it.
    """
    over, end, places = threading.Event(), time.monotonic() + (seconds or 0), []

    def call():
        with torch.enable_grad():
            return function(*arguments)

    def ring(number, frame):
        frames = [at for at, _ in traceback.walk_stack(frame)]
        codes = [at.f_code for at in frames]
        if time.monotonic() < end or call.__code__ not in codes:
            return
        inside = frames[:codes.index(call.__code__)]
        places.append(place_of([place for place in traceback.extract_stack(frame)[-len(inside):]
                                if os.path.dirname(place.filename) != HERE]))
        if len(places) > 2:  # the function has caught it: so at its next line once more, wherever
            for at in inside:
                at.f_trace = at_next_line
            sys.settrace(at_next_line)
        raise Late(places[0])

    def at_next_line(frame, event, arg):
        if event == "line":
            raise Late(places[0])
        return at_next_line

    def wake():  # a function that waits: it uses no time of the CPU, but other threads run
        left = seconds
        while not over.wait(left):
            left = 0.5
            signal.pthread_kill(threading.main_thread().ident, signal.SIGVTALRM)

    if seconds is None:
        return call()
    thread, tracer = threading.Thread(target=wake, daemon=True), sys.gettrace()
    faulthandler.dump_traceback_later(seconds + LAST_RESORT, exit=True, file=2)
    try:
        # no SIGALRM: packages have timers of that kind, as math-verify does. It stays until the
        # next call, because a signal without a handler would end the process
        signal.signal(signal.SIGVTALRM, ring)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.5, 0.5)  # of the CPU's seconds
        thread.start()
        result = call()
        if places:
            raise Late(places[0])
        return result
    except BaseException as e:  # perhaps another one, which the function made of it
        if places:
            raise Late(places[0]) from e
        raise
    finally:
        sys.settrace(tracer)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        over.set()
        faulthandler.cancel_dump_traceback_later()
