/* The gate at which writers give way to learners (cpp/locking/write_gate.h): two writers, a learner that may die at any step,
 * and a stranger who writes anything to the gate at any moment. README.md says what is left out.
 *
 *   ROWS      rows of each writer
 *   CALLS     calls of the learner
 *   STRANGER  how often anything may be written to the gate
 * and every naive variant is a flag by itself.
 *
 * Time passes when nobody else can move: then a writer that has seen no progress gives up.
 */
#define WRITERS 2
#define BUDGET  1
#define OPEN    255

byte head, gate = OPEN, signal, work;
bool sleepers;

/* Wakes all that sleep: `signal` is another than the one they have seen. */
inline wake() {
  sleepers = false;
  signal++
}

inline open_at(ticket) {
  gate = ticket;
  if
  :: sleepers -> wake()
  :: else
  fi
}

active [WRITERS] proctype Writer() {
  byte seen, mark, ticket, rows;
  do
  :: rows == ROWS -> break
  :: rows < ROWS && head < gate ->
progress:
     atomic { head++; rows++ }
  :: rows < ROWS && head >= gate ->
     mark = work;
     do
     :: true ->
        seen = signal;
#ifdef LOOKFIRST
        ticket = gate;
        sleepers = true;
#else
        sleepers = true;
        ticket = gate;
#endif
        if
        :: head < ticket -> break
        :: else
        fi;
        if
        :: signal != seen
        :: timeout ->                      /* nobody else can move: as much time as writers wait has passed */
           assert(head >= gate || STRANGER) /* sleeps_at_an_open_gate */;
#ifndef NOGIVINGUP
           if
           :: work == mark ->
              atomic {
                if
                :: gate == ticket -> gate = OPEN
                :: else
                fi
              }
              wake();
              break
           :: else -> mark = work
           fi
#else
           mark = work
#endif
        fi
     od
  od
}

/* It absorbs all there is; the gate opens for a turn of the writers, or follows what was absorbed. */
active proctype Learner() {
  byte calls, absorbed, ticket;
  do
  :: calls == CALLS -> break
  :: true -> break                         /* it dies, or is late for ever */
  :: calls < CALLS ->
     work++;
     if
     :: gate == OPEN -> gate = absorbed + BUDGET
     :: else
     fi;
     if
     :: true -> goto dead
     :: true
     fi;
     absorbed = head;
     work++;
     ticket = gate;
     if
     :: head >= ticket -> open_at(head + BUDGET)
     :: head < ticket && ticket != OPEN -> open_at(absorbed + BUDGET)
     :: else
     fi;
     calls++
  od;
dead:
  skip
}

active proctype Stranger() {
  byte writes, anything;
  do
  :: writes == STRANGER -> break
  :: writes < STRANGER ->
     select(anything : 0 .. 2 * ROWS + 1);
     gate = anything;
     writes++
  od
}

/* Whatever happens, all writers come to their end: an end state in which one does not is invalid, and so is a cycle. */
