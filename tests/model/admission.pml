/* Admission: how many items are begun, counted from what is there. README.md says what is modelled. */

#define NO 255
#define LEARNER 3
#define NEXT 4                /* who goes on when the learner has died */

/* What is shared. Slots: the ticket + 1 of the row that is there, and of the one that is absorbed. */
byte word[CAP], at[CAP];
byte claim[CAP];              /* 0: nobody had it; 1, 2: held, by a learner; 3: done; 4: nobody gets it */
bit leaf[CAP];
byte head, absorbed;
byte handed_out, gone;        /* of rows that are there; of rows that have gone */
short done_before;            /* of these so many do not count */
byte going1, gone_with_it;    /* the row that is going, and what `gone` is then */
byte open[3];                 /* of writers 1 and 2: items that they may write */
byte version;
bit dirty;
byte owner;                   /* of the lock; 0: nobody */

/* What the verdicts know. */
bit dead[6];
byte kills = KILLS;
/* Items that were admitted, and neither given back nor lost with their writer. One whose version has come counts once
   more when it is to be drawn again, until somebody is done with it who had learnt from it. */
byte truth;
bit published[CAP];           /* the version of its item has come */
bit again[CAP];               /* it was drawn by who has died */
byte finished;

#ifndef AGE
#define AGE 0
#endif
#define LIMIT ((AGE + 1 + version) * BATCH)
#define HAS_ROOM (head - absorbed < CAP && (word[head % CAP] == 0 || claim[head % CAP] >= 3))
#define IS_OUT(c) ((c) >= 1 && (c) <= 3)
#define HELD(who) ((who) - LEARNER + 1)

/* A death here, if there is one left. */
#define MAY_DIE if :: kills > 0 -> atomic { kills--; dead[me] = 1; goto died } :: true fi

inline lock() {
  atomic { owner == 0 || dead[owner] -> owner = me };
  if :: dirty -> recover() :: else fi
}
/* What was looked at is forgotten: else the same state would be another one. */
inline forget() { s = 0; g = 0; end = 0; n = 0 }
inline unlock() { d_step { forget(); owner = 0 } }

inline end_item(s) {
  if :: IS_OUT(claim[s]) -> handed_out--; MAY_DIE :: else fi;
  claim[s] = 4;
  MAY_DIE
}

inline finish_going() {
  if
  :: going1 != 0 ->
    gone = gone_with_it;
    MAY_DIE;
    g = (going1 - 1) % CAP;
    if :: at[g] == going1 -> end_item(g) :: else fi;
    going1 = 0;
    MAY_DIE
  :: else
  fi
}

inline evict(s) {
  if
  :: IS_OUT(claim[s]) ->
#ifdef NOLOG
    gone++;
    MAY_DIE;
    handed_out--;
#else
    gone_with_it = gone + 1;
    going1 = at[s];
    MAY_DIE;
    finish_going();
#endif
  :: else
  fi;
  leaf[s] = 0;
  MAY_DIE;
  claim[s] = 4;
  atomic { at[s] = 0; published[s] = 0; again[s] = 0 };
  MAY_DIE;
  claim[s] = 0
}

inline absorb() {
  dirty = 1;
  end = head;
  do
  :: absorbed < end ->
    s = absorbed % CAP;
    if :: at[s] != 0 && at[s] != word[s] -> evict(s) :: else fi;
    if
    :: at[s] == 0 && word[s] != 0 -> claim[s] = 0; at[s] = word[s]; MAY_DIE; leaf[s] = 1; MAY_DIE
    :: else
    fi;
    absorbed++;
    MAY_DIE
  :: else -> break
  od;
  dirty = 0
}

/* Rows that were passed go; what is counted is counted anew. */
inline recover() {
  finish_going();
  s = 0;
  do
  :: s < CAP ->
    if :: at[s] != 0 && at[s] != word[s] -> evict(s) :: else fi;
    s++
  :: else -> break
  od;
  s = 0; handed_out = 0;
  do
  :: s < CAP ->
    if :: at[s] == 0 -> claim[s] = 0; leaf[s] = 0 :: else fi;
    if :: IS_OUT(claim[s]) -> handed_out++ :: else fi;
    leaf[s] = (at[s] != 0 && claim[s] == 0);
    s++
  :: else -> break
  od;
  MAY_DIE;
  dirty = 0
}

/* The sum over writers, one after the other; and the rest. */
inline count(n) {
#ifdef ROWSFIRST
  n = head - absorbed;
  n = n + open[1];
  n = n + open[2];
#else
  n = open[1];
  n = n + open[2];
  n = n + head - absorbed;
#endif
  s = 0;
  do :: s < CAP -> n = n + leaf[s]; s++ :: else -> break od;
  n = n + handed_out + gone - done_before
}

proctype Writer(byte me) {
  byte s, g, end, n, items = ITEMS;
  bit wrote;
  do
  :: items > 0 ->
    items--;
    lock();
    MAY_DIE;
    count(n);
    if
    :: n < LIMIT ->
      atomic { open[me]++; truth++; assert(truth <= LIMIT) };  /* no_more_than_admitted */
      MAY_DIE;
      unlock();
      wrote = 0;
      if
      :: atomic { HAS_ROOM -> wrote = 1 }
      :: true  /* the block ends without a row */
      fi;
#ifdef GIVEFIRST
      open[me]--;
#endif
      if
      :: wrote ->
        atomic { if :: HAS_ROOM -> word[head % CAP] = head + 1; head++ :: else -> wrote = 0 fi }
      :: else
      fi;
      if :: wrote && kills > 0 -> atomic { kills--; dead[me] = 1; goto died_written } :: true fi;
#ifndef GIVEFIRST
      atomic { open[me]--; truth = truth - !wrote }
#else
      truth = truth - !wrote
#endif
    :: else -> absorb(); unlock()
    fi
  :: else -> break
  od;
  goto over;
died:
  atomic { truth = truth - open[me]; goto over };  /* what it had begun is lost */
died_written:  /* its row is there, and counts */
over:
  skip;
  d_step { forget(); finished++ }
}

/* Of items that are handed out those whose version has yet to come, at most `most`. */
inline unpublished(u, most) {
  u = handed_out + gone - done_before - version * BATCH;
  u = (u < 0 -> 0 : (u > most -> most : u))
}

/* Of `n` items those whose version has come stay counted. */
inline come_again() {
#ifdef NOAGAIN
  skip
#else
  atomic { done_before = done_before - u; u = 0 };
  MAY_DIE
#endif
}

/* What `who` holds is to be drawn again. */
inline release(who) {
  u = 0;
  dirty = 1;
  s = 0; n = 0;
  do :: s < CAP -> n = n + (claim[s] == HELD(who)); s++ :: else -> break od;
  atomic { unpublished(u, n); u = n - u };
#ifndef COUNTLATE
  come_again();
#endif
  s = 0;
  do
  :: s < CAP ->
    if
    :: claim[s] == HELD(who) ->
      leaf[s] = 1;
      MAY_DIE;
      atomic { claim[s] = 0; truth = truth + published[s]; published[s] = 0; again[s] = dead[who] };
      MAY_DIE;
      handed_out--;
      MAY_DIE
    :: else
    fi;
    s++
  :: else -> break
  od;
#ifdef COUNTLATE
  come_again();
#endif
  dirty = 0
}

/* What it has taken so does not count any more: its version is none that will come. */
inline settle() {
  s = 0;
  do
  :: s < CAP -> if :: again[s] && claim[s] == HELD(me) -> published[s] = 1; truth-- :: else fi; s++
  :: else -> break
  od
}

inline commit() {
  d_step {
    s = 0;
    do
    :: s < CAP -> if :: claim[s] == HELD(me) -> claim[s] = 3 :: else fi; s++
    :: else -> break
    od
  }
}

/* Who goes on from what it has saved is done with what came again, as it had learnt from it. */
inline end_draws() {
  dirty = 1;
  s = 0; n = 0;
#ifdef LEARNTFIRST
  do :: s < CAP -> n = n + (again[s] && leaf[s]); s++ :: else -> break od;
  done_before = done_before + n;
  MAY_DIE;
  s = 0;
#endif
  do
  :: s < CAP ->
    if
    :: again[s] && leaf[s] -> claim[s] = HELD(me); MAY_DIE; handed_out++; n++; leaf[s] = 0; MAY_DIE
    :: else
    fi;
    s++
  :: else -> break
  od;
#ifdef NOLEARNT
  atomic { n = 0; settle() };
#else
#ifdef LEARNTFIRST
  atomic { n = 0; settle() };
#else
  atomic { done_before = done_before + n; n = 0; settle() };
#endif
#endif
  MAY_DIE;
  commit();
  dirty = 0
}

/* Draws items, and publishes a version for each batch. It is done with them when it saves, or gives them back. */
proctype Learner(byte me) {
  byte s, g, end, mine, n, fresh, rounds = DRAWS;
  short u;
  if
  :: me == NEXT ->
end_next:
    dead[LEARNER];
    lock();
    absorb();
    release(LEARNER);
    if :: end_draws() :: true fi;
    unlock()
  :: else
  fi;
  do
  :: rounds > 0 ->
    rounds--;
    lock();
    absorb();
    mine = 0;
    do
    :: mine < CAP && leaf[mine] == 0 -> mine++
    :: else -> break
    od;
    if
    :: mine < CAP ->
      dirty = 1;
      claim[mine] = HELD(me); again[mine] = 0; MAY_DIE;
      handed_out++; leaf[mine] = 0; MAY_DIE;
      dirty = 0;
      fresh++
    :: else
    fi;
    unlock();
    MAY_DIE;
    if
    :: fresh == BATCH ->
      d_step {
        version++; fresh = 0;
        s = 0;
        do
        :: s < CAP -> if :: claim[s] == HELD(me) -> published[s] = 1 :: else fi; s++
        :: else -> break
        od
      };
      MAY_DIE
    :: fresh != BATCH
    :: true -> lock(); release(me); fresh = 0; unlock()
    fi;
    mine = 0;
    if
    :: fresh == 0 -> lock(); dirty = 1; commit(); MAY_DIE; dirty = 0; unlock()
    :: true
    fi
  :: else -> break
  od;
died:
  skip;
  d_step { forget(); mine = 0; fresh = 0; finished++ }
}

/* Once all is quiet: the dead writers' items are given back, and what counts is what is true. */
init {
  byte me = 5, s, g, end, n;
  short u;
  atomic {
    run Writer(1);
    run Writer(2);
    run Learner(LEARNER);
#ifdef GOES_ON
    run Learner(NEXT)
#endif
  };
#ifdef GOES_ON
  finished == 3 + dead[LEARNER];
#else
  finished == 3;
#endif
  kills = 0;
#ifndef NORECLAIM
  if :: dead[1] -> open[1] = 0 :: else fi;
  if :: dead[2] -> open[2] = 0 :: else fi;
#endif
  lock();
  absorb();
  if :: dead[LEARNER] -> release(LEARNER) :: else fi;
  if :: dead[NEXT] -> release(NEXT) :: else fi;
  count(n);
  assert(n == truth);  /* nothing_leaks_or_doubles */
died:
  skip
}
